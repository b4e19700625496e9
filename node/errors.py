"""Every error an operator can meet: one table, and the constructor that fills it in.

``python -m node.errors > docs/errors.md`` writes the table for people. Code that knows more than
the table says it in ``what``, ``why`` and ``fix``; the table has what is typical.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from protocols.errors import UPGRADE, OperatorError, is_full, reason

EXIT_USAGE = 2
EXIT_INTERNAL = 70  # EX_SOFTWARE of sysexits.h
WRITABLE = "see that the disk is sound and that this user may write there"


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table."""

    code: str
    title: str
    why: str
    fix: str
    exit_code: int = 1


_ROWS = (
    Kind(
        "E101",
        "a peer cannot be reached",
        "its name does not resolve, nothing listens there, no answer came in time, something "
        "other than Atoll answers, the TLS handshake failed, or this machine has no room for "
        "another connection; the message says which",
        "check the address, that the peer runs, and that its firewall lets its port in",
    ),
    Kind(
        "E102",
        "an address is malformed",
        "a peer's address is HOST:PORT or HOST:PORT/ID, with IPv6 hosts in brackets; "
        "multiaddresses (/ip4/…) and URLs are not taken",
        "copy the address from the join line that the other node prints",
        EXIT_USAGE,
    ),
    Kind(
        "E103",
        "another identity answers at that address",
        "the peer made a new key, another node took its port, or somebody stands in between",
        "ask its operator for the current join line; leave out /ID only on a network you trust",
    ),
    Kind(
        "E104",
        "the identity file cannot be used",
        "it is not an unencrypted PEM file with an ed25519 key, other users can read it, or it is "
        "not the key that the checkpoint to go on from was made with",
        "chmod 600 the file, put the right one back, or make a new one with "
        "`node keygen --out FILE`",
        EXIT_USAGE,
    ),
    Kind(
        "E105",
        "the state directory cannot be used",
        "another node is running in it, this user cannot write there, or it has checkpoints of "
        "another run, or of one that would begin anew; as a warning: of the run that the node "
        "joins again, of which it takes nothing without --resume",
        "give each node of a machine its own --dir (scripts: dir=)",
    ),
    Kind(
        "E106",
        "no running node answers",
        "none runs with this state directory, or it stopped without cleaning up",
        "start one with `node start`, or name it with --dir or --api; `node runs` lists them",
    ),
    Kind(
        "E107",
        "a node does not stop",
        "it is still writing its last checkpoint, waits for others to finish a round, or hangs; or "
        "it runs in another container or on another machine, and cannot be asked from here",
        "wait, or end it at once with `node stop --now`; where it runs in a container, stop that",
    ),
    Kind(
        "E108",
        "another node has this node's key",
        "identity.pem, or the whole state directory, was copied and started elsewhere; of two "
        "nodes with one key the swarm believes the newer one, which goes on",
        "let each node make its own key; to move a node, stop it before its directory is copied",
    ),
    Kind(
        "E201",
        "the run's configuration differs",
        "this node was given a run that is not the swarm's; the message names the fields, those "
        "first that were set here",
        "leave out --run to take the swarm's manifest, or correct the fields named",
    ),
    Kind(
        "E202",
        "protocol versions differ",
        "the two nodes have protocol versions that do not understand each other (the message has "
        "both), or a run's manifest, a checkpoint, or what a node says of itself, is of a form "
        "that this version does not know",
        UPGRADE,
    ),
    Kind(
        "E203",
        "the invitation is missing or not valid",
        "the run admits only those who know its invitation, a secret that all its nodes share; "
        "or it has none, and one is given",
        "ask somebody in the run for it and give it with --invitation; leave it out where the run "
        "has none",
    ),
    Kind(
        "E204",
        "bad configuration",
        "a flag or key is unknown, a value is out of its bounds, or two contradict each other",
        "correct what is named; `node config show` lists every setting of a node and of a run",
        EXIT_USAGE,
    ),
    Kind(
        "E205",
        "the manifest does not verify",
        "its hash is not the run that was asked for, or its signature is not its creator's",
        "ask the run's creator for a join line, and dial that node",
    ),
    Kind(
        "E206",
        "the swarm's history does not verify",
        "no peer could show by whose signatures the swarm came from the run's creator to where it "
        "says it is: whoever announces that state is not telling the truth, or serves another run; "
        "or office was handed over so often that members keep no more of it (the message says)",
        "ask the run's creator for a join line, and give other peers with --peers",
    ),
    Kind(
        "E301",
        "the clock is wrong",
        "signed records expire by wall clock, and this machine's differs from its peers' median",
        "set the clock: sudo timedatectl set-ntp true (or: sudo chronyc makestep)",
    ),
    Kind(
        "E302",
        "peers cannot dial this node",
        "a NAT or firewall keeps connections out, and no peer relays for it: a node that can be "
        "dialled would, unless --require-reachable or a --public-addr that is wrong forbids it",
        "forward the port and give its public address with --public-addr HOST:PORT, or have the "
        "router forward it with --map-port, or start a node elsewhere that can be dialled, as a "
        "relay",
    ),
    Kind(
        "E303",
        "the port is in use",
        "another process listens on it; the message has its pid where it can be read",
        "stop that process, or listen elsewhere with --listen or --api",
    ),
    Kind(
        "E401",
        "out of memory",
        "model, optimizer state and activations do not fit; the micro-batch was halved and "
        "gradients accumulated, down to one sequence",
        "give --recompute full, on GPUs --offload, more ranks (--nproc, --nnodes) or a layout that "
        "shards (--layout auto), a larger device, or a run with a smaller model or seq_len",
    ),
    Kind(
        "E402",
        "the disk is full",
        "at the start there must be room for the checkpoints to keep (the best, and "
        "--keep-checkpoints, by "
        "default 2) and the one being written, with --checkpoint-copy for one more, and for small "
        "files such as api.json; later the node trains on and skips checkpoints until there is, "
        "and ends with this error where there is no room for its last one, or for four minutes "
        "none for the next data of a stream or a URL",
        "free space, lower --keep-checkpoints, or give another --dir",
    ),
    Kind(
        "E403",
        "CUDA and the driver disagree",
        "this build of torch needs a newer driver than the one installed; the message has both",
        "update the driver, install torch for its CUDA version, or use --device cpu",
    ),
    Kind(
        "E404",
        "a checkpoint is damaged",
        "a file of it is missing or its hash differs from the one recorded",
        "resume from an older checkpoint, or start without --resume to take the state from peers",
    ),
    Kind(
        "E405",
        "the trainer died",
        "a trainer rank ended by itself or was killed; the message and its log have its last words",
        "see the trainer's log in the state directory; exit status -9 usually means out of memory",
    ),
    Kind(
        "E406",
        "a trainer rank is stuck",
        "the others waited in a collective call for longer than it may take, while a rank that did "
        "not die was not in it; or the whole node, suspended or frozen, stood still for most of "
        "such a call, and no rank is to blame; or nothing has come for an hour, or 20 times the "
        "longest silence so far (six times that up to its first step, or more), from the only one: "
        "its device hangs, its disk does, or it was stopped; or training data do not come, and "
        "nothing of them has moved for an hour; all ranks are started again from the last merge",
        "see the log of the rank that is named; on a GPU, dmesg shows whether the device failed",
    ),
    Kind(
        "E407",
        "the copy of checkpoints cannot be used",
        "the place that --checkpoint-copy names, or --from of `node export`, cannot be reached, "
        "refuses or holds another run's; once a node runs, training and the checkpoints on this "
        "machine's disk go on",
        "check the URL and its credentials; object stores need their fsspec library (s3fs, gcsfs)",
    ),
    Kind(
        "E408",
        "a host of the island is lost",
        "its processes were killed, or nothing has come from it for ten seconds: it or its link is "
        "down; or it is there, and its ranks cannot go on; the ranks that are left start again "
        "from the last merge, with the same batch",
        "start it again with the same command: it is taken in after a round at the latest; its log "
        "says more",
    ),
    Kind(
        "E409",
        "hosts of the island are missing",
        "fewer are there than --nnodes asks for, or host 0 does not answer at --rdzv-endpoint",
        "start the same command on every host; give MIN:MAX to go on with fewer",
    ),
    Kind(
        "E410",
        "a host cannot take part in its island",
        "its version of Atoll, its device, its rendezvous id or its training tokens differ from "
        "host 0's, another host has its number, or it came by a link-local address; the message "
        "says which",
        "give all hosts the same command, the same version and the same data; where the text has "
        "changed since host 0 read it, --resume and --data on host 0 have all read it anew",
    ),
    Kind(
        "E411",
        "layers cannot be compiled",
        "--compile needs a C++ compiler on this machine, and the library triton for a GPU",
        "install g++ (or name a compiler with CXX), or leave out --compile",
    ),
    Kind(
        "E501",
        "no peers",
        "none of the given or cached peers could be joined; each is listed with its own reason",
        "check that one of them runs, or give another with --peers",
    ),
    Kind(
        "E502",
        "the run or its state cannot be fetched",
        "the peers that have it went away (where all did, the run may be over), moved on too "
        "quickly, or served what does not verify",
        "try again; if it repeats, give other peers with --peers",
    ),
    Kind(
        "E601",
        "no training text",
        "the corpus cannot be read, or not be kept here, has too few tokens for one sequence, or "
        "which one an island has trained on is not known any more",
        "give text files with --data, or use the recipe `docstrings`, which needs no download",
    ),
    Kind(
        "E602",
        "the export cannot be written",
        "its folder exists and is not empty, or the disk refuses",
        "name another folder, or free some disk space",
    ),
    Kind(
        "E603",
        "a token folder cannot be used",
        "a file of it is missing, cannot be written or has another hash, it is not finished, or it "
        "was made for another run's tokenizer",
        "make it again with `node data prepare`, and look at it with `node data inspect`",
    ),
    Kind(
        "E604",
        "the tokenizer cannot be used",
        "it is no tokenizer.json of the tokenizers library, or not the one of this run",
        "give a tokenizer.json with --tokenizer; whoever joins a run is given the run's own",
    ),
    Kind(
        "E605",
        "a library is missing",
        "what was asked for needs a library that is not installed with Atoll itself, or Atoll's "
        "installation is not complete",
        "install the extra that the message names, or Atoll again",
    ),
    Kind(
        "E606",
        "the model cannot be built",
        "its configuration is not one that the transformers library makes a causal language model "
        "of without further code, or its weights do not fit it",
        "give a folder with config.json and safetensors of a model that transformers has built in",
    ),
    Kind(
        "E999",
        "internal error",
        "Atoll has a defect: an exception that nothing expected; its traceback is in the log file",
        "report it with that file",
        EXIT_INTERNAL,
    ),
)
TABLE: Mapping[str, Kind] = {kind.code: kind for kind in _ROWS}


# a password may have an @ itself; from a word's first letter only, else long words take long
_URL = re.compile(
    r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]+://)(?:[^\s/?#]*@)?([^\s?'\"]*)(\?[^\s'\"]*)?"
)


def without_credentials(text: str) -> str:
    """The text without user, password and query (keys, signatures) of the URLs in it."""
    return _URL.sub(lambda url: f"{url[1]}{url[2]}{'?…' if url[3] else ''}", text)


def operator_error(code: str, what: str = "", *, why: str = "", fix: str = "") -> OperatorError:
    """An :class:`OperatorError` of the table; what is left out comes from its row.

    Its texts go to logs and dashboards: URLs in them lose their credentials.
    """
    kind = TABLE[code]
    return OperatorError(
        code,
        without_credentials(what or kind.title),
        without_credentials(why or kind.why),
        without_credentials(fix or kind.fix),
        exit_code=kind.exit_code,
    )


def cannot_write(
    what: str, error: OSError, *, fix: str = WRITABLE, full_fix: str = "", otherwise: str = "E601"
) -> OperatorError:
    """E402 of a full disk, where ``full_fix`` counts (empty: the table's); ``otherwise`` else."""
    code, todo = ("E402", full_fix) if is_full(error) else (otherwise, fix)
    return operator_error(code, what, why=reason(error), fix=todo)


def with_extra(extra: str) -> str:
    """How the libraries of an extra are installed beside this Atoll, which pip has no name of."""
    return f"{shlex.quote(sys.executable)} -m pip install -e '.[{extra}]', in the clone of Atoll"


def document() -> str:
    """docs/errors.md."""
    lines = [
        "# Errors",
        "",
        "Written by `python -m node.errors > docs/errors.md`; do not edit.",
        "",
        "An error is printed as text on standard error: what happened, why, what to do. The exit",
        "status is 2 for wrong usage, 70 for a defect of Atoll, 130 where Ctrl-C ends a command at",
        "once, otherwise 1. A node that leaves in order, as after one Ctrl-C, ends with 0.",
        "",
        "| code | what | typical reason | what to do | exit |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {kind.code} | {kind.title} | {kind.why} | {kind.fix} | {kind.exit_code} |"
        for kind in TABLE.values()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
