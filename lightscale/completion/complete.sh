# Completes a command line of lightscale: the arguments are its words behind `lightscale`, the last one up to the cursor.
# Prints what can stand there, a line each: the word, a tab, a description. A word that ends in = or / or . goes on.
# The line `:files` says that the shell is to complete files too.
#
# POSIX sh: every shell runs this same script, and no Python is started. In front of it stands the function `tables`:
#     tables commands PATH          the commands behind the words PATH, with their help
#     tables options PATH           its options, with their help
#     tables kind "PATH WORD"       what follows the option WORD; or stands at the position WORD, from 0, or * for all others
#     tables configs | keys         the shipped runs; the keys of a configuration, with their meaning
#     tables values KEY             what a key can be, where it is one of some words

tab='	'

# Of lines on standard input, those that begin with $1.
offer() {
    while IFS= read -r line; do
        case $line in
            "$1"*) printf '%s%s\n' "$prefix" "$line" ;;
        esac
    done
}

# Runs by the paths of their directories; by name too, where that was begun. Without any, a directory may lead to one.
offer_runs() {
    found=$(list_runs)
    if [ -n "$found" ]; then
        printf '%s\n' "$found"
    else
        echo :files
    fi
}

list_runs() {
    for file in "$word"*/config.toml "$word"*/*/config.toml ${word:+"runs/$word"*/config.toml}; do
        [ -e "$file" ] || continue
        run=${file%/config.toml}
        case $run in
            "$word"*) printf '%s%s%s\n' "$prefix" "$run" "${tab}run" ;;
            *) printf '%s%s%s\n' "$prefix" "${run#runs/}" "${tab}run" ;;
        esac
    done
}

# RUN@STEP: the steps of its checkpoints.
offer_steps() {
    name=${word%@*}
    run=$name
    [ -e "$run" ] || run=runs/$name
    for folder in "$run"/checkpoints/step-*[0-9]; do
        [ -d "$folder" ] || continue
        step=${folder##*/step-}
        # Names have leading zeros, steps have none.
        step=${step#"${step%%[!0]*}"}
        printf '%s\n' "$name@${step:-0}"
    done | offer "$word"
}

offer_overrides() {
    case $word in
        *=*) tables values "${word%%=*}" | while IFS= read -r value; do printf '%s=%s\n' "${word%%=*}" "$value"; done ;;
        *) tables keys ;;
    esac | offer "$word"
}

offer_kind() {
    case $1 in
        CONFIG)
            tables configs | offer "$word"
            echo :files
            ;;
        OVERRIDE) offer_overrides ;;
        RUN*@*)
            case $word in
                *@*) offer_steps ;;
                *) offer_runs ;;
            esac
            ;;
        RUN) offer_runs ;;
        KEY) tables keys | sed 's/=//' | offer "$word" ;;
        FILE) echo :files ;;
        COMMAND) tables commands "$path" | offer "$word" ;;
        WORDS:*) tables words "${1#WORDS:}" | offer "$word" ;;
    esac
}

# Where on the line the word stands: behind the commands in $path, and behind $position other arguments.
path= position=0 takes= prefix=
while [ $# -gt 1 ]; do
    if [ -n "$takes" ]; then
        takes=
    else
        case $1 in
            --*=*) ;;
            -?*) takes=$(tables kind "$path $1") ;;
            *)
                if [ "$position" = 0 ] && [ "$(tables kind "$path 0")" = COMMAND ]; then
                    path="$path $1"
                else
                    position=$((position + 1))
                fi
                ;;
        esac
    fi
    shift
done
word=$1

if [ -n "$takes" ]; then
    offer_kind "$takes"
else
    case $word in
        --*=*)
            prefix=${word%%=*}=
            takes=$(tables kind "$path ${word%%=*}")
            word=${word#*=}
            offer_kind "$takes"
            ;;
        -*) tables options "$path" | offer "$word" ;;
        *)
            kind=$(tables kind "$path $position")
            offer_kind "${kind:-$(tables kind "$path *")}"
            ;;
    esac
fi
