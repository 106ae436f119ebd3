#compdef lightscale
# Completion of lightscale @VERSION@ for zsh. Print it again after an upgrade: lightscale completion zsh.

typeset -g _lightscale_complete=@SCRIPT@

_lightscale() {
    local line word
    local -a plain plain_texts open open_texts
    for line in "${(@f)$(sh -c "$_lightscale_complete" lightscale "${(@)words[2,CURRENT-1]}" "$PREFIX")}"; do
        word=${line%%$'\t'*}
        case $word in
            '') ;;
            :files) _files ;;
            # These words go on.
            *[=/.]) open+=("$word") open_texts+=("$word  ${line#*$'\t'}") ;;
            *) plain+=("$word") plain_texts+=("$word  ${line#*$'\t'}") ;;
        esac
    done
    compadd -Q -l -d plain_texts -a plain
    compadd -Q -l -S '' -d open_texts -a open
}

# By autoload from a folder of fpath the file is the function; sourced, it is declared.
if [[ $funcstack[1] == _lightscale ]]; then
    _lightscale "$@"
else
    compdef _lightscale lightscale
fi
