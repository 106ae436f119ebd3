# Completion of lightscale @VERSION@ for bash. Print it again after an upgrade: lightscale completion bash.

_lightscale_complete=@SCRIPT@

_lightscale() {
    # COMP_WORDS is split at = and @ too; by blanks alone the words are those that lightscale gets.
    local line=${COMP_LINE:0:COMP_POINT} words=() found=()
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local word=${words[-1]} one
    # Of a word with =, bash replaces only what stands behind the last one; of a word with @, it is replaced too.
    local before=${word%"${word##*[$COMP_WORDBREAKS]}"}
    before=${before%@}
    COMPREPLY=()
    mapfile -t found < <(sh -c "$_lightscale_complete" lightscale "${words[@]:1}")
    for one in "${found[@]}"; do
        one=${one%%$'\t'*}
        if [[ $one == :files ]]; then
            compopt -o filenames
            mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "${word#"$before"}")
        else
            COMPREPLY+=("${one#"$before"}")
        fi
    done
    # These words go on.
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/.] ]] && compopt -o nospace
    return 0
}

complete -F _lightscale lightscale
