/* completion.c: three short scripts around --list-options (opt.c: words, argument, choices, help). */
#include "completion.h"

#include "commands.h"

#include <string.h>

static const char bash_text[] =
    "# bash completion for qx and its siblings; made by 'qx --completion bash'\n"
    "_qx_complete() {\n"
    "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} prog=${COMP_WORDS[0]}\n"
    "    local -a words\n"
    "    local line choices arg\n"
    "    COMPREPLY=()\n"
    "    if [[ ${prog##*/} == qx ]]; then\n"
    "        if (( COMP_CWORD == 1 )) || { (( COMP_CWORD == 2 )) && [[ $prev == help ]]; }; then\n"
    "            mapfile -t COMPREPLY < <(compgen -W \"@COMMANDS@ help\" -- \"$cur\")\n"
    "            return\n"
    "        fi\n"
    "        words=(\"$prog\" \"${COMP_WORDS[1]}\")\n"
    "    else\n"
    "        words=(\"$prog\")\n"
    "    fi\n"
    "    [[ $prev == = ]] && prev=${COMP_WORDS[COMP_CWORD-2]}\n"
    "    [[ $cur == = ]] && { cur=; prev=${COMP_WORDS[COMP_CWORD-1]}; }\n"
    "    while IFS= read -r line; do\n"
    "        IFS=$'\\x1f' read -r names arg choices _ <<< \"${line//$'\\t'/$'\\x1f'}\"\n"
    "        if [[ \",$names,\" == *\",$prev,\"* && -n $arg && $arg != \\[* ]]; then\n"
    "            if [[ -n $choices ]]; then\n"
    "                mapfile -t COMPREPLY < <(compgen -W \"${choices//,/ }\" -- \"$cur\")\n"
    "            else\n"
    "                mapfile -t COMPREPLY < <(compgen -f -- \"$cur\")\n"
    "            fi\n"
    "            return\n"
    "        fi\n"
    "        names_all+=\" ${names//,/ }\"\n"
    "    done < <(\"${words[@]}\" --list-options 2>/dev/null)\n"
    "    if [[ $cur == -* ]]; then\n"
    "        mapfile -t COMPREPLY < <(compgen -W \"$names_all\" -- \"$cur\")\n"
    "    else\n"
    "        mapfile -t COMPREPLY < <(compgen -f -- \"$cur\")\n"
    "    fi\n"
    "}\n"
    "_qx() {\n"
    "    local names='' names_all=''\n"
    "    _qx_complete\n"
    "}\n"
    "complete -o filenames -F _qx qx @PROGRAMS@\n";

static const char zsh_text[] =
    "#compdef qx @PROGRAMS@\n"
    "# zsh completion for qx and its siblings; made by 'qx --completion zsh'\n"
    "_qx() {\n"
    "    local prog=$words[1] line\n"
    "    local -a cmd commands parts specs\n"
    "    commands=(\n@ZSH_COMMANDS@    )\n"
    "    if [[ ${prog:t} == qx ]]; then\n"
    "        if (( CURRENT == 2 )); then\n"
    "            _describe command commands\n"
    "            return\n"
    "        fi\n"
    "        cmd=($prog $words[2])\n"
    "        words=(\"${(@)words[2,-1]}\")\n"
    "        (( CURRENT-- ))\n"
    "    else\n"
    "        cmd=($prog)\n"
    "    fi\n"
    "    for line in ${(f)\"$($cmd --list-options 2>/dev/null)\"}; do\n"
    "        parts=(\"${(@ps:\\t:)line}\")\n"
    "        local help=${${parts[4]//\\[/(}//\\]/)} value=\n"
    "        help=${help//:/;}\n"
    "        if [[ -n $parts[3] ]]; then\n"
    "            value=\":${parts[2]}:(${parts[3]//,/ })\"\n"
    "        elif [[ $parts[2] == \\[* ]]; then\n"
    "            value=\n"
    "        elif [[ -n $parts[2] ]]; then\n"
    "            value=\":${parts[2]}:_files\"\n"
    "        fi\n"
    "        for name in ${(s:,:)parts[1]}; do\n"
    "            specs+=(\"*${name}[${help}]${value}\")\n"
    "        done\n"
    "    done\n"
    "    _arguments -s $specs '*:path:_files'\n"
    "}\n"
    "_qx \"$@\"\n";

static const char fish_text[] =
    "# fish completion for qx and its siblings; made by 'qx --completion fish'\n"
    "function __qx_options\n"
    "    set -l words (commandline -opc)\n"
    "    set -l prog $words[1]\n"
    "    if string match -qr '(^|/)qx$' -- $prog\n"
    "        test (count $words) -ge 2; or return\n"
    "        set prog $words[1] $words[2]\n"
    "    end\n"
    "    for line in ($prog --list-options 2>/dev/null)\n"
    "        set -l parts (string split \\t -- $line)\n"
    "        if test -n \"$parts[3]\"; and contains -- $words[-1] (string split , -- $parts[1])\n"
    "            string split , -- $parts[3]\n"
    "        end\n"
    "        for name in (string split , -- $parts[1])\n"
    "            printf '%s\\t%s\\n' $name $parts[4]\n"
    "        end\n"
    "    end\n"
    "end\n"
    "@FISH_COMMANDS@"
    "for prog in qx @PROGRAMS@\n"
    "    complete -c $prog -a '(__qx_options)'\n"
    "end\n";

static void programs(struct qx_buf *b)
{
    for (size_t i = 0; i < QX_ARRAY_LEN(commands); i++) {
        qx_buf_fmt(b, "%sqx-%s", i ? " " : "", commands[i].name);
    }
}

static void names(struct qx_buf *b)
{
    for (size_t i = 0; i < QX_ARRAY_LEN(commands); i++) {
        qx_buf_fmt(b, "%s%s", i ? " " : "", commands[i].name);
    }
}

static void zsh_commands(struct qx_buf *b)
{
    for (size_t i = 0; i < QX_ARRAY_LEN(commands); i++) {
        qx_buf_fmt(b, "        '%s:%s'\n", commands[i].name, commands[i].summary);
    }
}

static void fish_commands(struct qx_buf *b)
{
    for (size_t i = 0; i < QX_ARRAY_LEN(commands); i++) {
        qx_buf_fmt(b, "complete -c qx -n __fish_use_subcommand -a %s -d '%s'\n", commands[i].name,
                   commands[i].summary);
    }
}

static const struct {
    const char *mark;
    void (*fill)(struct qx_buf *b);
} marks[] = {
    {"@PROGRAMS@", programs},
    {"@COMMANDS@", names},
    {"@ZSH_COMMANDS@", zsh_commands},
    {"@FISH_COMMANDS@", fish_commands},
};

bool completion_script(struct qx_buf *b, const char *shell)
{
    const char *text = !strcmp(shell, "bash")   ? bash_text
                       : !strcmp(shell, "zsh")  ? zsh_text
                       : !strcmp(shell, "fish") ? fish_text
                                                : NULL;
    if (!text) {
        return false;
    }
    while (*text) {
        size_t i = 0;
        if (*text == '@') {
            while (i < QX_ARRAY_LEN(marks) &&
                   strncmp(text, marks[i].mark, strlen(marks[i].mark)) != 0) {
                i++;
            }
            if (i < QX_ARRAY_LEN(marks)) {
                marks[i].fill(b);
                text += strlen(marks[i].mark);
                continue;
            }
        }
        qx_buf_chr(b, *text++);
    }
    return true;
}
