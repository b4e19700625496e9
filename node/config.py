"""A node's own settings: everything that may differ from one island to the next.

What must be equal on all islands stands in the manifest (:mod:`bootstrap.manifest`). A setting
comes from a flag, else from the environment (``ATOLL_LISTEN``), else from a TOML file
(``--config``, or ``node.toml`` in the state directory), else from its default;
:meth:`NodeConfig.source` tells which. The descriptions below are also the command line's help.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from bootstrap.validation import bad_config, explain, nearest, read_toml
from node.island.settings import IslandSettings
from node.setting_values import (
    DEFAULT_PORT,
    HostPort,
    Label,
    LocalPath,
    PathOrUrl,
    bytes_at_most,
    dialable,
    fast_enough,
    host_port,
    large_enough,
    read_peers,
    read_sinks,
    size,
    speed,
)
from protocols.addresses import is_loopback
from protocols.bounds import MAX_ROSTER

DEFAULT_API_PORT = 4391
ENVIRONMENT_PREFIX = "ATOLL_"
MAX_PEERS_GIVEN = 256
SECRETS = ("invitation", "api_key", "rdzv_id")  # never shown


class NodeConfig(IslandSettings):
    """The settings of one node, validated; immutable."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    run: LocalPath | None = Field(
        default=None, description="TOML file of the run to create; its tables are the manifest's."
    )
    peers: Annotated[tuple[str, ...], BeforeValidator(read_peers)] = Field(
        default=(),
        max_length=MAX_PEERS_GIVEN,
        description="Peers to join: HOST:PORT[/ID]; repeats, commas, spaces and @FILE work.",
    )
    listen: HostPort = Field(
        default=f"0.0.0.0:{DEFAULT_PORT}",
        min_length=1,
        description="HOST:PORT to listen on for peers; port 0: any free one.",
    )
    public_addr: Annotated[str, AfterValidator(dialable)] = Field(
        default="", description="HOST:PORT under which others reach this node."
    )
    map_port: bool = Field(
        default=False,
        description="Have the router forward the port to this node (UPnP; needs the extra `upnp`).",
    )
    max_upload: Annotated[float, BeforeValidator(speed), AfterValidator(fast_enough)] = Field(
        default=0.0,
        ge=0,
        description="Upload at most this much a second, as in 20Mbit or 2.5MB; 0: no limit.",
    )
    relay: Annotated[float, BeforeValidator(speed), AfterValidator(fast_enough)] = Field(
        default=2.5e6,
        ge=0,
        description="Carry at most this much a second between nodes that nobody can dial, and half "
        "of --max-upload and of the link; 0: carry nothing, and only tell them who calls.",
    )
    require_reachable: bool = Field(
        default=False, description="Stop if peers cannot dial this node, rather than use a relay."
    )
    api: HostPort = Field(
        default=f"127.0.0.1:{DEFAULT_API_PORT}",
        min_length=1,
        description="HOST:PORT of the local dashboard, API and metrics.",
    )
    api_key: str = Field(
        default="",
        pattern=r"^([\x21-\x7e]{16,256})?$",
        description="Key the API asks for; needed where --api is not a loopback address.",
    )
    dashboard: HostPort = Field(
        default="",
        description="HOST:PORT to show the dashboard to others, read-only; on any but a loopback "
        "address it asks for the key (--api-key, or one that is made).",
    )
    dir: LocalPath = Field(
        default=Path("~/.atoll"), description="State directory: identity, checkpoints, logs."
    )
    identity: LocalPath | None = Field(
        default=None, description="Key file; by default identity.pem in the state directory."
    )
    name: Label = Field(default="", description="What others see this node called.")
    region: Label = Field(default="", description="Where it is, as others are to see it.")
    role: Literal["island", "server", "seed", "observer"] = Field(
        default="island",
        description="island trains; server merges without training; seed introduces peers and "
        "serves the state; observer watches.",
    )
    data: PathOrUrl | None = Field(
        default=None,
        description="This island's training data: a file or folder of text, or several with : "
        "between; a token folder (`node data prepare`) or its URL; datasets:NAME@SPLIT to stream; "
        "docstrings, the run's recipe.",
    )
    data_cache: Annotated[float, BeforeValidator(size), AfterValidator(large_enough)] = Field(
        default=20e9, description="Keep at most this much of a URL's files, as in 20GB."
    )
    tokenizer: LocalPath | None = Field(
        default=None,
        description="tokenizer.json of a run to create; by default that of a token folder or of "
        "--init-from, else bytes.",
    )
    hf_config: LocalPath | None = Field(
        default=None,
        description="config.json of a transformers model: the run to create trains it anew.",
    )
    init_from: LocalPath | None = Field(
        default=None,
        description="Folder in Hugging Face's format: the run to create starts from its weights.",
    )
    invitation: Annotated[str, bytes_at_most(256)] = Field(
        default="", description="The run's invitation, where one is needed."
    )
    max_identities: int = Field(
        default=64,
        ge=0,
        description="Take in at most this many peers from one address (IPv6: one /56), or behind "
        "one relay; 0: any number.",
    )
    checkpoint_every: int = Field(
        default=10, ge=0, description="Rounds between checkpoints; 0: none."
    )
    checkpoint_seconds: float = Field(
        default=600.0,
        ge=0,
        description="Seconds between checkpoints where rounds are further apart, or ten times what "
        "one takes, if that is more; 0: rounds alone.",
    )
    keep_checkpoints: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="How many checkpoints to keep: the newest, besides the one with the lowest "
        "validation loss.",
    )
    checkpoint_copy: str = Field(
        default="", max_length=1024, description="Path or URL (fsspec) for a second copy of them."
    )
    resume: bool = Field(
        default=False, description="Go on from the newest checkpoint in the state directory."
    )
    inner_steps: int = Field(
        default=0,
        ge=0,
        le=10_000_000,  # as of a run
        description="Inner steps of this island between contributions; 0: as the run says, fewer "
        "where it is slower.",
    )
    wait_s: float = Field(
        default=120.0, ge=0, description="Seconds to look for peers before giving up; 0: for ever."
    )
    wait_for: int = Field(
        default=0,
        ge=0,
        le=MAX_ROSTER,
        description="The run to create begins once so many islands are there, this one counted; 0: "
        "at once.",
    )
    seconds: float = Field(default=0.0, ge=0, description="Stop after this many seconds; 0: never.")
    rounds: int = Field(
        default=0,
        ge=0,
        description="Stop after this many rounds from where the run stands; 0: when it ends.",
    )
    sink: Annotated[tuple[str, ...], BeforeValidator(read_sinks)] = Field(
        default=(),
        max_length=16,
        description="Write figures of steps and rounds to jsonl:PATH, tensorboard:DIR or "
        "wandb:PROJECT as well; repeats work.",
    )
    json_log: bool = Field(default=False, description="Log JSON lines instead of text.")

    @model_validator(mode="after")
    def _api_guarded(self) -> NodeConfig:
        if not self.api_key and not is_loopback(host_port(self.api)[0]):
            raise ValueError(
                f"api {self.api} is open to the network: set api_key, or use 127.0.0.1"
            )
        return self

    @property
    def identity_path(self) -> Path:
        """Where the key file is."""
        return self.identity or self.dir / "identity.pem"

    def source(self, key: str) -> str:
        """Where a value came from: ``--listen``, ``ATOLL_LISTEN``, a file's path, ``default``."""
        return self._sources.get(key, "default")

    @property
    def named_api(self) -> str:
        """Where the operator says the API is; empty where the state directory knows better.

        Port 0 leaves it to the node, which notes there what it took.
        """
        return "" if self.is_default("api") or host_port(self.api)[1] == 0 else self.api

    @property
    def named_peers(self) -> tuple[str, ...]:
        """Peers that a flag names: not those whom the node of this machine joins."""
        return self.peers if self.source("peers") == "--peers" else ()

    def is_default(self, key: str) -> bool:
        """Whether nobody set this key: then a port in use may be replaced by a free one."""
        return key not in self._sources


def resolve(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config_file: Path | None = None,
    *,
    here: bool = True,
) -> NodeConfig:
    """Merge flags over the environment over the file over the defaults.

    A flag of ``None`` was not given. Not ``here``: no settings file of this machine counts.
    Raises :class:`~protocols.errors.OperatorError` E204 for unknown keys (naming the nearest) and
    bad values, each with where it came from, also for an invitation that is given and empty, and
    E102 for a peer's address that is malformed.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    from_environment = _environment(environ)
    if here:
        config_file = _config_file(given, from_environment, environ, config_file)
    from_file = _flat(read_toml(config_file)) if config_file is not None else {}

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer, label in (
        (from_file, lambda key: str(config_file)),
        (from_environment, _variable),
        (given, lambda key: "--" + key.replace("_", "-")),
    ):
        values |= layer
        sources |= {key: label(key) for key in layer}
    if not str((from_environment | given).get("invitation", "none")).strip():
        raise bad_config(  # a variable of the shell that is not set would open the run to all
            "bad setting",
            f"invitation: is empty (from {sources['invitation']})",
            "give the secret, or leave it out",
        )
    try:
        config = NodeConfig.model_validate(values)
    except ValidationError as error:
        raise _explained(error, sources) from error
    config._sources = sources
    return config


def _flat(file: dict[str, Any]) -> dict[str, Any]:
    """A settings file with its section ``[island]`` taken up; raises E204 for a strange key."""
    section = file.get("island")
    if not isinstance(section, Mapping):
        return file
    for key in section:
        if key not in IslandSettings.model_fields:
            raise bad_config(
                f"unknown setting island.{key}",
                "no key of that section has that name" + nearest(key, IslandSettings.model_fields),
                "correct what is named above",
            )
    return {key: value for key, value in file.items() if key != "island"} | dict(section)


# what Kubernetes sets in pods for services called atoll or atoll-…: docs.kubernetes.io, "Service"
_OF_A_SERVICE = re.compile(
    ENVIRONMENT_PREFIX
    + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
NO_SETTINGS = (ENVIRONMENT_PREFIX + "CONFIG", ENVIRONMENT_PREFIX + "KERNELS")  # read elsewhere


def _variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper()


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    known = {_variable(key): key for key in NodeConfig.model_fields}
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in NO_SETTINGS:
            continue
        if variable not in known:
            if "KUBERNETES_SERVICE_HOST" in environ and _OF_A_SERVICE.fullmatch(variable):
                continue
            raise bad_config(
                f"unknown environment variable {variable}",
                "no setting has that name" + nearest(variable, known),
                f"unset {variable}, or see `node config show`",
            )
        found[known[variable]] = value
    return found


def _config_file(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    environ: Mapping[str, str],
    given: Path | None,
) -> Path | None:
    if given is not None:
        return given
    if environ.get(_variable("config")):
        return Path(environ[_variable("config")])
    default = NodeConfig.model_fields["dir"].default
    home = Path(os.path.expanduser(flags.get("dir") or environment.get("dir") or default))
    return home / "node.toml" if (home / "node.toml").exists() else None


def _explained(error: ValidationError, sources: Mapping[str, str]) -> Exception:
    lines = []
    for item, line in zip(error.errors(), explain(error, NodeConfig), strict=True):
        key = str(item["loc"][0]) if item["loc"] else ""
        source = sources.get(key)
        if key in SECRETS:
            line = f"{key}: is not in the form of one"
        lines.append(f"{line} (from {source})" if source else line)
    return bad_config(
        f"bad setting{'s' if len(lines) > 1 else ''}",
        "\n       ".join(lines),
        "correct what is named above; `node config show` lists every setting and its source",
    )
