"""The outermost level of a command: runs it, and words whatever it ends with."""

from __future__ import annotations

import os
import select
import sys
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from node.errors import operator_error
from node.interrupts import EXIT_INTERRUPTED
from protocols.errors import OperatorError, is_full, reason

_USUAL = "~/.atoll"
_MAX_SETTINGS_BYTES = 64 * 1024
_NO_TEMPORARY = "No usable temporary directory"  # how tempfile begins, which has no class for it


def run(arguments: Sequence[str]) -> int:
    """Run the command line; its exit status, as :func:`node.__main__.main` says."""
    given = list(arguments)
    name = "atoll" if Path(sys.argv[0]).stem == "atoll" else "node"
    try:
        from typer.main import get_command

        from node.cli import app
        from node.commands.guards import refuse_empty_peers, refuse_nodejs
        from node.commands.usage import WrongUsage, told

        refuse_nodejs(given)
        refuse_empty_peers(given)
        try:
            # not through the app itself, which would set sys.excepthook for good
            command = get_command(app)
            status = command(args=given, prog_name=name, standalone_mode=False)
        except WrongUsage as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # a group alone: what it says is help
                error.show()
                return int(error.exit_code)
            raise told(error) from error
        return status if isinstance(status, int) else 0
    except SystemExit as ending:  # how click ends every command
        if _has_read_enough(ending.__context__):
            return 0
        return ending.code if isinstance(ending.code, int) else int(bool(ending.code))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001  # the last resort: nobody is shown a traceback
        return report(error, given)


def report(error: BaseException, arguments: Sequence[str] = ()) -> int:
    """Tell the operator what went wrong on standard error; returns the exit status.

    Several errors of a task group are told one after the other. What is no
    :class:`OperatorError` is a defect: its traceback goes to a file, the terminal gets E999.
    """
    home = _state_directory(arguments)
    leaves = [_known(leaf, home) for leaf in _leaves(error)]
    known = [leaf for leaf in leaves if isinstance(leaf, OperatorError)]
    if len(known) == len(leaves):
        unique = {leaf.text(): leaf for leaf in known}
        sys.stderr.write("\n".join(unique) + "\n")
        return known[0].exit_code
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return EXIT_INTERRUPTED
    defect = next(leaf for leaf in leaves if not isinstance(leaf, OperatorError))
    told = _internal(error, defect, arguments)
    sys.stderr.write("\n".join([*(leaf.text() for leaf in known), told.text()]) + "\n")
    return told.exit_code


def first_known(error: BaseException, arguments: Sequence[str] = ()) -> OperatorError:
    """The first of what :func:`report` tells, for whoever is told in another way."""
    home = _state_directory(arguments)
    for leaf in (_known(one, home) for one in _leaves(error)):
        if isinstance(leaf, OperatorError):
            return leaf
    return operator_error("E999", why=f"{type(error).__name__}: {error}")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _known(error: BaseException, home: Path) -> BaseException:
    """An error of a full disk, met anywhere, as E402, as where no temporary file can be made.

    Another error of the disk in the state directory is E105, and a library that is not there E605;
    any other error is left as it is.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        from node.doctor.software import OURS

        library = error.name.partition(".")[0]
        if library not in OURS:
            return operator_error(
                "E605",
                f"the library {library} is not installed",
                why="Atoll needs it: its installation is not complete",
                fix="make clean, then make .venv, in the clone of Atoll",
            )
    if not isinstance(error, OSError):
        return error
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    if isinstance(error, FileNotFoundError) and reason(error).startswith(_NO_TEMPORARY):
        return operator_error(
            "E402",
            "no temporary directory can be written to",
            why=f"the disk is full or read-only: {reason(error)}",
            fix="free space, or set TMPDIR to a folder that can be written",
        )
    if is_full(error):
        if not where and _output_is_refused():
            return operator_error(
                "E402",
                "standard output cannot be written",
                why=reason(error),
                fix="free space where it goes to, or send it elsewhere",
            )
        at = f" at {where}" if where else ""
        return operator_error("E402", f"the disk is full{at}", why=reason(error))
    if where and home.absolute() in Path(where).parents:
        return operator_error(
            "E105",
            f"cannot use {where}",
            why=reason(error),
            fix="see that the disk is sound and that this user may write there, or move away what "
            "has that name",
        )
    return error


def _has_read_enough(error: BaseException | None) -> bool:
    """Whether a command ended since nobody reads its output any more, as with ``| head``."""
    if not isinstance(error, BrokenPipeError):
        return False
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # no file
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _output_is_refused() -> bool:
    """Whether it is standard output that cannot be written; nothing more is written to it then."""
    try:
        sys.stdout.write("\n")  # without a buffer a flush alone would tell nothing
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return True
    return False


def _internal(
    error: BaseException, defect: BaseException, arguments: Sequence[str]
) -> OperatorError:
    from node.statedir import StateDir

    text = "".join(traceback.format_exception(error))
    log = StateDir(_state_directory(arguments)).crash_log(text)
    where = f"the traceback is in {log}" if log else f"no log could be written\n{text}"
    return operator_error("E999", why=f"{type(defect).__name__}: {defect}; {where}")


def _state_directory(arguments: Sequence[str]) -> Path:
    """The state directory as far as it can be told when all else may be broken."""
    given = _option(arguments, "--dir") or os.environ.get("ATOLL_DIR") or _configured(arguments)
    return Path(os.path.expanduser(given or _USUAL))


def _option(arguments: Sequence[str], name: str) -> str:
    """What an option is given; empty where it is not."""
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    return ""


def _configured(arguments: Sequence[str]) -> str:
    """What the settings file says it is; empty where it does not, or is no such file."""
    given = _option(arguments, "--config") or os.environ.get("ATOLL_CONFIG")
    path = Path(given or os.path.expanduser(f"{_USUAL}/node.toml"))
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file():  # a pipe has been read, and would be waited for
            with path.open("rb") as file:
                found = tomllib.loads(file.read(_MAX_SETTINGS_BYTES).decode()).get("dir")
            return found if isinstance(found, str) else ""
    return ""
