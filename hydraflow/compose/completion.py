"""Tab completion in bash: `eval "$(python -m hydraflow.main_ppo -sc install=bash)"`.

In: the words after `-sc`. Out: the completion script. Hydra completes `python file.py` and installed
programs; this script adds `python -m hydraflow.<name>`, and asks Hydra for the candidates.
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
    """Prints the script if `words` ask for bash; else returns False, and Hydra answers."""
    if list(words) != ["install=bash"]:
        return False
    print(_SCRIPT)
    return True
