# The scripts are valid, and bash completes commands, options and words of choices.
qx --completion bash > qx.bash
qx --completion zsh | grep -q '^#compdef qx qx-inspect' || echo "zsh script"
qx --completion fish | grep -q 'complete -c' || echo "fish script"
command -v zsh > /dev/null && { qx --completion zsh > _qx; zsh -n _qx; }
command -v fish > /dev/null && { qx --completion fish > qx.fish; fish -n qx.fish; }
# shellcheck disable=SC1091
. ./qx.bash
complete_words() {
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    _qx
    echo "${COMPREPLY[*]}"
}
[ "$(complete_words qx ins)" = inspect ] || echo "commands"
[ "$(complete_words qx-run --effort m)" = medium ] || echo "choices"
[ "$(complete_words qx run --tem)" = "--template --temperature" ] || echo "options: $(complete_words qx run --tem)"
qx --completion tcsh 2> /dev/null
[ $? = 2 ] || echo "tcsh is accepted"
