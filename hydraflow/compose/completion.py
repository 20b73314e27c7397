"""Tab completion in bash: `eval "$(python -m hydraflow.main_ppo -sc install=bash)"`.

In: what follows `-sc`. Out: the script that teaches the shell. Hydra completes `python file.py` and installed
programs; ours adds `python -m hydraflow.<name>`, and leaves the answers to Hydra.
"""

from __future__ import annotations

from collections.abc import Sequence

_SCRIPT = r"""_hydraflow_completion()
{
    local words=($COMP_LINE)
    if [[ "${words[1]}" != "-m" || "${words[2]}" != hydraflow.* ]]; then
        COMPREPLY=($(compgen -o default -- "${COMP_WORDS[COMP_CWORD]}"))
        return
    fi
    local line="app ${words[*]:3}"
    [[ "$COMP_LINE" == *" " ]] && line="$line "
    local word=""
    [[ "$COMP_LINE" == *" " ]] || word="${words[-1]}"
    local found="$(COMP_LINE="$line" "${words[0]}" -m "${words[2]}" -sc query=bash 2>/dev/null)"
    COMPREPLY=($(compgen -W "$found" -- "$word"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _hydraflow_completion python python3"""


def install(words: Sequence[str]) -> bool:
    """Prints the script where `words` ask for bash's; else leaves it to Hydra and returns False."""
    if list(words) != ["install=bash"]:
        return False
    print(_SCRIPT)
    return True
