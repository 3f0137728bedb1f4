/* qx.c: the front door. `qx NAME ...` becomes the sibling program qx-NAME; the rest is help. */
#include "commands.h"
#include "completion.h"
#include "exit_code.h"
#include "opt.h"
#include "str.h"
#include "ui.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void main_help(struct qx_buf *b)
{
    qx_buf_str(b, "qx COMMAND [OPTION]... [ARGUMENT]...\n"
                  "qx help [COMMAND]\n"
                  "\n"
                  "Checkpoints of Qwen3.8-Flash-Next: look, check, convert, run.\n"
                  "\nCommands:\n");
    for (size_t i = 0; i < QX_ARRAY_LEN(commands); i++) {
        qx_buf_fmt(b, "  %-12s %s\n", commands[i].name, commands[i].summary);
    }
    qx_buf_str(b, "\nOptions:\n"
                  "  -h, --help                  this text\n"
                  "  -V, --version               version, build options, libraries\n"
                  "      --completion SHELL      completion script for bash, zsh or fish\n"
                  "\nExamples:\n"
                  "  qx inspect sample\n"
                  "  qx verify sample\n"
                  "  qx run sample -p 'In the beginning'\n"
                  "\nqx COMMAND -h shows a command's usage, --help all of its options.\n");
}

static int say(struct ui *ui, struct qx_buf *b)
{
    ui_out(b->p ? b->p : "", b->n);
    int rc = ui_finish(ui, b->failed ? EXIT_RESOURCE : EXIT_OK);
    qx_buf_fini(b);
    return rc;
}

static const struct command *find_command(const char *name)
{
    for (size_t i = 0; i < QX_ARRAY_LEN(commands); i++) {
        if (!strcmp(commands[i].name, name)) {
            return &commands[i];
        }
    }
    return NULL;
}

static int unknown_command(const struct ui *ui, const char *name)
{
    const char *best = NULL;
    unsigned best_d = 4;
    for (size_t i = 0; i < QX_ARRAY_LEN(commands); i++) {
        unsigned d = strlen(name) > 2 && qx_str_starts(commands[i].name, name)
                         ? 1
                         : qx_str_distance(commands[i].name, name);
        if (d < best_d && d < strlen(name)) {
            best_d = d;
            best = commands[i].name;
        }
    }
    if (best) {
        ui_error(ui, "unknown command '%s' (did you mean '%s'?)", name, best);
    } else {
        ui_error(ui, "unknown command '%s' (see qx help)", name);
    }
    return EXIT_USAGE;
}

/* Replaces this process by qx-NAME: beside this executable if it is there, else by the search path. */
static int become(const struct ui *ui, const char *name, char **argv)
{
    static char program[80]; /* becomes the first word of the next program */
    char self[PATH_MAX], path[PATH_MAX + 96];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    snprintf(program, sizeof program, "qx-%.60s", name);
    argv[0] = program;
    if (n > 0) {
        self[n] = '\0';
        char *slash = strrchr(self, '/');
        if (slash) {
            *slash = '\0';
            snprintf(path, sizeof path, "%s/%s", self, program);
            execv(path, argv);
        }
    }
    if (n <= 0 || errno == ENOENT) {
        execvp(program, argv);
    }
    ui_error(ui, "cannot start '%s': %s", program, strerror(errno));
    return EXIT_INPUT;
}

int main(int argc, char **argv)
{
    struct opt_common common = {0};
    struct ui ui;
    struct qx_buf b = {0};
    ui_init(&ui, "qx", &common);
    if (argc < 2) {
        main_help(&b);
        fputs(qx_buf_cstr(&b) ? b.p : "", stderr);
        qx_buf_fini(&b);
        return EXIT_USAGE;
    }
    const char *name = argv[1];
    if (!strcmp(name, "help") || !strcmp(name, "--help") || !strcmp(name, "-h")) {
        if (argc > 2 && !find_command(argv[2])) {
            return unknown_command(&ui, argv[2]);
        }
        if (argc > 3) {
            ui_error(&ui, "extra argument '%s'", argv[3]);
            return EXIT_USAGE;
        }
        if (argc == 3) {
            char help[] = "--help";
            char *args[] = {NULL, help, NULL};
            return become(&ui, argv[2], args);
        }
        main_help(&b);
        return say(&ui, &b);
    }
    if (!strcmp(name, "--completion") || qx_str_starts(name, "--completion=")) {
        const char *shell = name[12] == '=' ? name + 13 : argc > 2 ? argv[2] : NULL;
        if (!shell) {
            ui_error(&ui, "option '--completion' wants a value (SHELL)");
            return EXIT_USAGE;
        }
        if (!completion_script(&b, shell)) {
            ui_error(&ui, "'--completion' wants bash, zsh or fish, not '%s'", shell);
            return EXIT_USAGE;
        }
        return say(&ui, &b);
    }
    if (name[0] == '-') {
        /* --version, and the messages for everything else. */
        static const struct opt none[] = {{.type = OPT_END}};
        static const struct opt_command self = {
            .name = "", .synopsis = "qx COMMAND [OPTION]... [ARGUMENT]...", .summary = "", .opts = none,
            .min_args = 1, .max_args = 0};
        char **args;
        int n_args;
        int rc = opt_parse(&self, argc, argv, &args, &n_args);
        return rc >= 0 ? rc : EXIT_USAGE;
    }
    if (!find_command(name)) {
        return unknown_command(&ui, name);
    }
    return become(&ui, name, argv + 1);
}
