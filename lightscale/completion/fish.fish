# Completion of lightscale @VERSION@ for fish. Print it again after an upgrade: lightscale completion fish.

set -g _lightscale_complete @SCRIPT@

function _lightscale
    set -l words (commandline -opc)
    for line in (sh -c $_lightscale_complete lightscale $words[2..-1] (commandline -ct))
        if test "$line" = :files
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end

complete -c lightscale -f -a '(_lightscale)'
