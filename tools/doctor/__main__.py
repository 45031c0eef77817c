"""Report what is installed, missing and mismatched where a run is to start.

    python -m isoloss.tools.doctor
    python -m isoloss.tools.doctor --output-dir /data/runs --port 29500 30000
    python -m isoloss.tools.doctor --servers http://node1:30000 http://node2:30000 --weight-sync broadcast

Prints a line for each finding: ok, note or problem; the part; what it is; what to do. Packages are not imported, but
torch where the driver has a GPU, and Transformer Engine where it is installed. --versions prints the versions that go
together.
Exit status: 0 no problem, 1 at least one, 2 a mistake in the arguments.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from isoloss.parallel import UserError
from isoloss.parallel.runtime import versions
from isoloss.parallel.runtime.nvidia_smi import read_driver
from isoloss.tools import command_line
from isoloss.tools.doctor import machine, version_page
from isoloss.tools.doctor.findings import Finding, count, table
from isoloss.tools.doctor.installed import read_installed
from isoloss.tools.doctor.packages import check_packages


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.versions:
        print(version_page.page())
        return 0
    findings = examine(arguments)
    status = int(count(findings, "problem") > 0)
    try:
        if arguments.json is not None:
            _write_json(arguments.json, findings, status)
    except UserError as mistake:
        print(f"isoloss: error: {mistake}", file=sys.stderr)
        return 2
    print(table(findings))
    return status


def examine(arguments: argparse.Namespace) -> list[Finding]:
    installed, driver = read_installed(), read_driver()
    has_gpu = driver is not None and len(driver.gpus) > 0
    return [
        *check_packages(installed, has_gpu),
        *machine.check_gpus(driver, installed),
        *machine.check_shared_memory(has_gpu),
        machine.check_disk(arguments.output_dir, arguments.free_gib),
        *machine.check_limits(),
        *machine.check_ports(arguments.port),
        *machine.check_servers(arguments.servers, arguments.weight_sync, installed),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = command_line.parser("doctor", __doc__)
    parser.add_argument("--servers", nargs="+", type=_url, default=[], metavar="URL", help="rollout.servers of the run")
    parser.add_argument(
        "--weight-sync", choices=versions.WEIGHT_SYNCS, default="broadcast", help="rollout.weight_sync of the run"
    )
    folder = "output_dir of the run; default: %(default)s"
    parser.add_argument("--output-dir", type=Path, default=Path("runs"), metavar="DIR", help=folder)
    free = "GiB that must be free there; default: %(default)g"
    parser.add_argument("--free-gib", type=float, default=10.0, metavar="N", help=free)
    parser.add_argument("--port", nargs="+", type=_port, default=[], metavar="N", help="ports that must be free here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    parser.add_argument("--versions", action="store_true", help="print the versions that go together, and nothing else")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 1 to 65535")
    return int(text)


def _url(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https") or not urlsplit(text).hostname:
        raise argparse.ArgumentTypeError(f"{text} is not a URL such as http://127.0.0.1:30000")
    return text


def _write_json(path: Path, findings: Sequence[Finding], status: int) -> None:
    """Write the findings. Raise UserError if the file cannot be written."""
    content = {"status": status, "findings": [asdict(finding) for finding in findings]}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json={path}: {error.strerror}; name a file in a folder that exists") from None


if __name__ == "__main__":
    sys.exit(main())
