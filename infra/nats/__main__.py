"""`python -m infra.nats [NAMESPACE]`: what an external NATS server and kvrelay.toml need to keep the roles apart.

Prints the server's `authorization` block with fresh passwords, and below it, as comments, the tables for kvrelay.toml.
"""

from __future__ import annotations

import argparse

from infra.nats.config import authorization
from infra.nats.credentials import Credentials
from infra.nats.roles import ACTORS


def both(namespace: str, credentials: Credentials) -> str:
    """The block for the server's configuration file, then the settings for each actor behind `# `."""
    logins = [credentials.roles[actor] for actor in ACTORS]
    tables = [f'[{one.user}]\nnats_user = "{one.user}"\nnats_password = "{one.password}"\n' for one in logins]
    lines = "\n".join(tables).splitlines()
    return authorization(namespace, credentials) + "\n" + "\n".join(f"# {line}".rstrip() for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m infra.nats", description=__doc__)
    parser.add_argument("namespace", nargs="?", default="kvrelay", help="as of --namespace; default: %(default)s")
    print(both(parser.parse_args().namespace, Credentials.generate("")))
