"""A local Ray cluster that no other user of this machine can read or reach.

In: the user's own folder on this machine (`system/node_folder.py`). Out: a token that every process of the
cluster requires, a session folder inside one that only this user can enter, and addresses of the loopback
interface only. By default Ray would write its token to ~/.ray/auth_token with mode 0644, keep sockets and
logs in /tmp/ray with mode 0777, and listen on every interface. Left out on purpose: clusters that are joined:
their owner decides (docs/cluster.md).
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from ray._private import ray_constants

from hydraflow.errors import ConfigError
from hydraflow.system.node_folder import make_node_folder, node_folder, session_folder

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
log = logging.getLogger(__name__)


def close_to_others() -> Path:
    """Prepares this process to start such a cluster; returns the folder for its sessions.

    A token named by the user's environment is kept, and so is RAY_AUTH_MODE=disabled, with a warning. Raises
    ConfigError when the named file holds no token, or RAY_TMPDIR is too long for sockets, EnvironmentFault
    when the user's folder is owned by another user.
    """
    if os.environ.get(MODE, "token").lower() != "token":
        text = "%s=%s: every user of this machine can run code in this run's Ray"
        log.warning(text, MODE, os.environ[MODE])
    elif not os.environ.get(TOKEN):
        os.environ[TOKEN_PATH] = _named_token() or str(token_file())
    # Ray's switch for platforms without multi-node support; with it Ray listens on the loopback interface.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False  # Ray's processes read the variable; this one already has
    return session_folder()


def _named_token() -> str:
    """The token file named by the environment, checked; empty if it names none."""
    named = os.environ.get(TOKEN_PATH, "")
    if named == str(_own_token()):  # this process set it for an earlier cluster
        return ""
    remedy = f"unset {TOKEN_PATH}: the run then creates its own token"
    try:
        if named and not Path(named).read_text().strip():
            raise ConfigError.one(TOKEN_PATH, named, "the file is empty", remedy)
    except OSError as error:
        rule = f"the token cannot be read: {error.strerror}"
        raise ConfigError.one(TOKEN_PATH, named, rule, remedy) from error
    return named


def _own_token() -> Path:
    return node_folder() / "ray-token"


def token_file() -> Path:
    """The file with the user's token on this machine, created if missing; all of the user's local runs share
    it."""
    make_node_folder()
    file = _own_token()
    if not file.exists():
        with tempfile.NamedTemporaryFile("w", dir=file.parent) as new:  # mode 0600
            new.write(secrets.token_hex(32))
            new.flush()
            with suppress(FileExistsError):  # another run of this user was first; link never overwrites
                os.link(new.name, file)
    os.utime(file)  # so that cleaners of temporary folders keep it
    return file
