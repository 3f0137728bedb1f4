/* opt.c: the option engine. Owns parsing and every text made from an option array: -h, --help and
 * --list-options. Its own scanner, because getopt_long cannot be told to refuse abbreviations. */
#include "opt.h"

#include "alloc.h"
#include "error.h"
#include "exit_code.h"
#include "json_out.h"
#include "str.h"
#include "ui.h"
#include "version.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LIST_BYTES (256u << 20)

const char *const opt_when[] = {"auto", "always", "never", NULL};

/* Options that every program answers without a row in its array. */
static const struct opt builtin[] = {
    {.type = OPT_FLAG, .letter = 'h', .name = "help", .help = "this text; -h is a short one"},
    {.type = OPT_FLAG, .letter = 'V', .name = "version", .help = "version, build options, libraries"},
    {.type = OPT_END},
};

/* Defaults from the environment, for the commands that have these options. */
static const struct { const char *option, *variable; } env_defaults[] = {
    {"device", "QX_DEVICE"},
    {"threads", "QX_THREADS"},
};

struct scan {
    const struct opt_command *cmd;
    bool env_given[QX_ARRAY_LEN(env_defaults)]; /* on the command line */
    char program[64];
    struct qx_error err; /* a file or standard input that cannot be read: not a usage error */
};

static void usage(const struct scan *s, const char *fmt, ...) QX_PRINTF(2, 3);
static void usage(const struct scan *s, const char *fmt, ...)
{
    va_list ap;
    struct qx_buf b = {0}, e = {0};
    char text[1024];
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    qx_buf_fmt(&b, "%s: ", s->program);
    qx_buf_escaped(&e, text, strlen(text));
    qx_buf_add(&b, e.p, e.n);
    qx_buf_chr(&b, '\n');
    if (qx_buf_cstr(&b)) {
        fputs(b.p, stderr);
    }
    qx_buf_fini(&b);
    qx_buf_fini(&e);
}

/* ---- finding an option --------------------------------------------------------------------- */

static const struct opt *find_in(const struct opt *o, const char *name, size_t n)
{
    for (; o->type != OPT_END; o++) {
        if (o->type != OPT_GROUP && o->name && strlen(o->name) == n && !memcmp(o->name, name, n)) {
            return o;
        }
    }
    return NULL;
}

static const struct opt *find_name(const struct scan *s, const char *name, size_t n)
{
    const struct opt *o = find_in(s->cmd->opts, name, n);
    return o ? o : find_in(builtin, name, n);
}

static const struct opt *find_letter(const struct scan *s, char c)
{
    for (const struct opt *o = s->cmd->opts; o->type != OPT_END; o++) {
        if (o->type != OPT_GROUP && o->letter == c) {
            return o;
        }
    }
    for (const struct opt *o = builtin; o->type != OPT_END; o++) {
        if (o->letter == c) {
            return o;
        }
    }
    return NULL;
}

static void unknown_option(const struct scan *s, const char *arg, const char *name)
{
    const char *best = NULL;
    unsigned best_d = 3;
    const struct opt *lists[] = {s->cmd->opts, builtin};
    for (size_t l = 0; l < QX_ARRAY_LEN(lists); l++) {
        for (const struct opt *o = lists[l]; o->type != OPT_END; o++) {
            if (o->type == OPT_GROUP || !o->name) {
                continue;
            }
            unsigned d = qx_str_starts(o->name, name) && strlen(name) > 2
                             ? 1
                             : qx_str_distance(o->name, name);
            if (d < best_d && d < strlen(name)) {
                best_d = d;
                best = o->name;
            }
        }
    }
    if (best) {
        usage(s, "unknown option '%s' (did you mean '--%s'?)", arg, best);
    } else {
        usage(s, "unknown option '%s' (see %s --help)", arg, s->program);
    }
}

/* ---- storing a value ------------------------------------------------------------------------ */

static bool takes_value(const struct opt *o)
{
    return o->type != OPT_FLAG && o->type != OPT_COUNT && o->type != OPT_OPTSTR;
}

/* Whole content of a file or of standard input ("-"). */
static bool read_all(struct scan *s, const char *path, struct qx_buf *b)
{
    bool is_stdin = !strcmp(path, "-");
    FILE *f = is_stdin ? stdin : fopen(path, "rb");
    if (!f) {
        qx_fail_errno(&s->err, errno == ENOENT ? QX_E_NOT_FOUND : QX_E_IO, errno, "io",
                      "cannot read list '%s'", path);
        return false;
    }
    char chunk[16384];
    size_t n;
    while ((n = fread(chunk, 1, sizeof chunk, f)) > 0 && !b->failed && b->n <= MAX_LIST_BYTES) {
        qx_buf_add(b, chunk, n);
    }
    if (ferror(f)) {
        qx_fail_errno(&s->err, QX_E_IO, errno, "io", "cannot read list '%s'", path);
    } else if (b->failed) {
        qx_fail_nomem(&s->err);
    } else if (b->n > MAX_LIST_BYTES) {
        qx_fail(&s->err, QX_E_VALUE, "list-too-long", "list '%s' is longer than %u MiB", path,
                MAX_LIST_BYTES >> 20);
    }
    if (!is_stdin) {
        fclose(f);
    }
    return s->err.code == QX_OK;
}

static int store_list(struct scan *s, const struct opt *o, const char *shown, const char *value)
{
    struct qx_u64_list *l = o->dest;
    struct qx_error err = {0};
    int rc;
    qx_u64_list_fini(l);
    if (!strcmp(value, "-") || value[0] == '@') {
        struct qx_buf b = {0};
        const char *path = value[0] == '@' ? value + 1 : value;
        if (!read_all(s, path, &b)) {
            qx_buf_fini(&b);
            return -1;
        }
        rc = qx_parse_list_text(b.p ? b.p : "", b.n, o->kind, l, &err);
        qx_buf_fini(&b);
    } else {
        rc = qx_parse_list(value, o->kind, l, &err);
    }
    if (rc) {
        if (err.code >= 10) {
            s->err = err;
        } else {
            usage(s, "%s: %s: %s", shown, err.kind, err.msg);
        }
        return -1;
    }
    return 0;
}

static int store(struct scan *s, const struct opt *o, const char *shown, const char *value, bool on)
{
    if (o->given) {
        *o->given = true;
    }
    for (size_t i = 0; i < QX_ARRAY_LEN(env_defaults); i++) {
        s->env_given[i] = s->env_given[i] || (o->name && !strcmp(o->name, env_defaults[i].option));
    }
    switch (o->type) {
    case OPT_FLAG:
        *(bool *)o->dest = on;
        return 0;
    case OPT_COUNT:
        *(unsigned *)o->dest = on ? *(unsigned *)o->dest + 1 : 0;
        return 0;
    case OPT_STR:
        *(const char **)o->dest = value;
        return 0;
    case OPT_OPTSTR:
        *(const char **)o->dest = value ? value : "";
        return 0;
    case OPT_STRS: {
        struct opt_strs *l = o->dest;
        if (l->n >= QX_ARRAY_LEN(l->v)) {
            usage(s, "'%s' is given more than %zu times", shown, QX_ARRAY_LEN(l->v));
            return -1;
        }
        l->v[l->n++] = value;
        return 0;
    }
    case OPT_U64:
        if (!qx_parse_u64(value, strlen(value), o->dest)) {
            usage(s, "'%s' wants a whole number, not '%s'", shown, value);
            return -1;
        }
        return 0;
    case OPT_F64:
        if (!qx_parse_f64(value, strlen(value), o->dest)) {
            usage(s, "'%s' wants a number, not '%s'", shown, value);
            return -1;
        }
        return 0;
    case OPT_SIZE: {
        struct qx_error err = {0};
        if (qx_parse_size(value, o->dest, &err)) {
            usage(s, "%s: %s", shown, err.msg);
            return -1;
        }
        return 0;
    }
    case OPT_LIST:
        return store_list(s, o, shown, value);
    case OPT_CHOICE: {
        struct qx_buf b = {0};
        for (const char *const *c = o->choices; *c; c++) {
            if (!strcmp(*c, value)) {
                *(const char **)o->dest = value;
                qx_buf_fini(&b);
                return 0;
            }
            qx_buf_fmt(&b, "%s%s", c == o->choices ? "" : c[1] ? ", " : " or ", *c);
        }
        usage(s, "'%s' wants %s, not '%s'", shown, qx_buf_cstr(&b) ? b.p : "another word", value);
        qx_buf_fini(&b);
        return -1;
    }
    case OPT_GROUP:
    case OPT_END:
        break;
    }
    return -1;
}

/* ---- texts ----------------------------------------------------------------------------------- */

static void option_head(struct qx_buf *b, const struct opt *o)
{
    if (o->letter) {
        qx_buf_fmt(b, "  -%c", o->letter);
        qx_buf_str(b, o->name ? ", " : "");
    } else {
        qx_buf_str(b, "      ");
    }
    if (o->name) {
        qx_buf_fmt(b, "--%s", o->name);
    }
    if (o->type == OPT_OPTSTR) {
        qx_buf_fmt(b, "[=%s]", o->arg ? o->arg : "TEXT");
    } else if (takes_value(o)) {
        qx_buf_fmt(b, " %s", o->arg ? o->arg : "VALUE");
    }
}

static void option_line(struct qx_buf *b, const struct opt *o)
{
    size_t start = b->n;
    option_head(b, o);
    size_t w = b->n - start;
    if (w > 30) {
        qx_buf_chr(b, '\n');
        w = 0;
    }
    qx_buf_fmt(b, "%*s  %s\n", (int)(30 - w), "", o->help ? o->help : "");
}

static void synopsis(struct qx_buf *b, const struct opt_command *cmd)
{
    qx_buf_str(b, cmd->synopsis);
    if (b->n && b->p[b->n - 1] != '\n') {
        qx_buf_chr(b, '\n');
    }
}

static void help_text(struct qx_buf *b, const struct scan *s, bool all)
{
    const struct opt_command *cmd = s->cmd;
    synopsis(b, cmd);
    qx_buf_fmt(b, "\n%s\n", cmd->summary);
    if (!all) {
        if (cmd->examples && cmd->examples[0]) {
            qx_buf_fmt(b, "\nExamples:\n%s", cmd->examples);
            if (b->n && b->p[b->n - 1] != '\n') {
                qx_buf_chr(b, '\n');
            }
        }
        qx_buf_fmt(b, "\n%s --help lists all options.\n", s->program);
        return;
    }
    if (cmd->opts[0].type != OPT_GROUP && cmd->opts[0].type != OPT_END) {
        qx_buf_str(b, "\nOptions:\n");
    }
    for (const struct opt *o = cmd->opts; o->type != OPT_END; o++) {
        if (o->type == OPT_GROUP) {
            qx_buf_fmt(b, "\n%s:\n", o->help);
        } else {
            option_line(b, o);
        }
    }
    for (const struct opt *o = builtin; o->type != OPT_END; o++) {
        option_line(b, o);
    }
    if (cmd->examples && cmd->examples[0]) {
        qx_buf_fmt(b, "\nExamples:\n%s", cmd->examples);
    }
}

/* A line per option for completion scripts: words (comma), argument, choices (comma), help; separated
 * by tabs. The argument is empty for switches and in brackets when optional. */
static void list_line(struct qx_buf *b, const struct opt *o)
{
    if (o->name) {
        qx_buf_fmt(b, "--%s", o->name);
    }
    if (o->letter) {
        qx_buf_fmt(b, "%s-%c", o->name ? "," : "", o->letter);
    }
    if (o->type == OPT_OPTSTR) {
        qx_buf_fmt(b, "\t[%s]\t", o->arg ? o->arg : "TEXT");
    } else if (takes_value(o)) {
        qx_buf_fmt(b, "\t%s\t", o->arg ? o->arg : "VALUE");
    } else {
        qx_buf_str(b, "\t\t");
    }
    for (const char *const *c = o->choices; c && *c; c++) {
        qx_buf_fmt(b, "%s%s", c == o->choices ? "" : ",", *c);
    }
    qx_buf_fmt(b, "\t%s\n", o->help ? o->help : "");
}

static void list_options(struct qx_buf *b, const struct scan *s)
{
    for (const struct opt *o = s->cmd->opts; o->type != OPT_END; o++) {
        if (o->type != OPT_GROUP) {
            list_line(b, o);
        }
    }
    for (const struct opt *o = builtin; o->type != OPT_END; o++) {
        list_line(b, o);
    }
}

static int answer(const struct scan *s, void (*fill)(struct qx_buf *, const struct scan *))
{
    struct ui ui = {.program = s->program};
    struct qx_buf b = {0};
    fill(&b, s);
    ui_out(b.p ? b.p : "", b.n);
    int rc = ui_finish(&ui, b.failed ? EXIT_RESOURCE : EXIT_OK);
    qx_buf_fini(&b);
    return rc;
}
static void fill_short(struct qx_buf *b, const struct scan *s)
{
    help_text(b, s, false);
}
static void fill_long(struct qx_buf *b, const struct scan *s)
{
    help_text(b, s, true);
}
static void fill_version(struct qx_buf *b, const struct scan *s)
{
    version_text(b, s->program);
}

/* ---- parsing --------------------------------------------------------------------------------- */

static bool want_json(const struct scan *s)
{
    const struct opt *o = find_in(s->cmd->opts, "json", 4);
    return o && o->type == OPT_FLAG && *(const bool *)o->dest;
}

enum { GO_ON = -1, BAD = -2 };

/* The separate value of an option. One that spells another option is a forgotten value: who means it
 * writes --opt=--value. */
static const char *next_value(const struct scan *s, const struct opt *o, const char *shown, int argc,
                              char **argv, int *i)
{
    const char *v = *i + 1 < argc ? argv[*i + 1] : NULL;
    if (!v || (v[0] == '-' && v[1] == '-' && v[2] && find_name(s, v + 2, strcspn(v + 2, "=")))) {
        usage(s, "option '%s' wants a value (%s)", shown, o->arg ? o->arg : "VALUE");
        return NULL;
    }
    ++*i;
    return v;
}

/* One long option; *i moves over a separate value. */
static int long_option(struct scan *s, int argc, char **argv, int *i)
{
    char shown[80];
    const char *name = argv[*i] + 2, *eq = strchr(name, '=');
    size_t n = eq ? (size_t)(eq - name) : strlen(name);
    const struct opt *o = find_name(s, name, n);
    bool on = true;
    if (!o && n > 3 && !strncmp(name, "no-", 3)) {
        o = find_name(s, name + 3, n - 3);
        if (o && o->type != OPT_FLAG && o->type != OPT_COUNT) {
            o = NULL;
        }
        if (o && !o->dest) {
            o = NULL;
        }
        on = false;
    }
    snprintf(shown, sizeof shown, "--%.*s", (int)(n > 70 ? 70 : n), name);
    if (!o) {
        if (!eq && !strcmp(name, "list-options")) {
            return answer(s, list_options);
        }
        unknown_option(s, shown, shown + 2);
        return BAD;
    }
    if (!takes_value(o) && o->type != OPT_OPTSTR) {
        if (eq) {
            usage(s, "option '%s' takes no value", shown);
            return BAD;
        }
        if (!o->dest) {
            return answer(s, o->letter == 'V' ? fill_version : fill_long);
        }
        return store(s, o, shown, NULL, on) ? BAD : GO_ON;
    }
    const char *value = eq ? eq + 1 : NULL;
    if (!value && takes_value(o)) {
        value = next_value(s, o, shown, argc, argv, i);
        if (!value) {
            return BAD;
        }
    }
    return store(s, o, shown, value, true) ? BAD : GO_ON;
}

static int from_environment(struct scan *s)
{
    for (size_t i = 0; i < QX_ARRAY_LEN(env_defaults); i++) {
        const struct opt *o = find_in(s->cmd->opts, env_defaults[i].option, strlen(env_defaults[i].option));
        const char *value = getenv(env_defaults[i].variable);
        if (!o || s->env_given[i] || !value || !value[0]) {
            continue;
        }
        struct opt quiet = *o; /* a default does not count as given */
        quiet.given = NULL;
        if (store(s, &quiet, env_defaults[i].variable, value, true)) {
            return BAD;
        }
    }
    return GO_ON;
}

/* A cluster of letters, the last of which may take a value: -vq, -n5, -n 5. */
static int short_options(struct scan *s, int argc, char **argv, int *i)
{
    for (const char *c = argv[*i] + 1; *c; c++) {
        const struct opt *o = find_letter(s, *c);
        char shown[8];
        snprintf(shown, sizeof shown, "-%c", *c);
        if (!o) {
            usage(s, "unknown option '%s' (see %s --help)", shown, s->program);
            return BAD;
        }
        if (!takes_value(o)) {
            if (!o->dest) {
                return answer(s, o->letter == 'V' ? fill_version : fill_short);
            }
            if (store(s, o, shown, NULL, true)) {
                return BAD;
            }
            continue;
        }
        const char *value = c[1] ? c + 1 : NULL;
        if (!value) {
            value = next_value(s, o, shown, argc, argv, i);
            if (!value) {
                return BAD;
            }
        }
        return store(s, o, shown, value, true) ? BAD : GO_ON;
    }
    return GO_ON;
}

int opt_parse(const struct opt_command *cmd, int argc, char **argv, char ***args, int *n_args)
{
    struct scan s = {.cmd = cmd};
    bool only_args = false;
    int n = 0;
    if (cmd->name && cmd->name[0]) {
        snprintf(s.program, sizeof s.program, "qx-%s", cmd->name);
    } else {
        snprintf(s.program, sizeof s.program, "qx");
    }
    /* Arguments are gathered at the front of argv, behind argv[0]: n never passes i. */
    for (int i = 1; i < argc; i++) {
        char *a = argv[i];
        int rc = GO_ON;
        if (only_args || a[0] != '-' || !a[1]) {
            argv[1 + n++] = a;
        } else if (!strcmp(a, "--")) {
            only_args = true;
        } else if (a[1] == '-') {
            rc = long_option(&s, argc, argv, &i);
        } else {
            rc = short_options(&s, argc, argv, &i);
        }
        if (rc == BAD) {
            if (s.err.code == QX_OK) {
                return EXIT_USAGE;
            }
            /* A list that cannot be read: parse the rest first, so that --json is known. */
            continue;
        }
        if (rc != GO_ON) {
            return rc;
        }
    }
    if (s.err.code != QX_OK) {
        struct ui ui = {.program = s.program, .json = want_json(&s)};
        return ui_finish(&ui, ui_fail(&ui, &s.err));
    }
    if (from_environment(&s) == BAD) {
        return EXIT_USAGE;
    }
    if (n < cmd->min_args) {
        const char *line = cmd->synopsis;
        usage(&s, "an argument is missing: %.*s", (int)strcspn(line, "\n"), line);
        return EXIT_USAGE;
    }
    if (cmd->max_args >= 0 && n > cmd->max_args) {
        usage(&s, "extra argument '%s'", argv[1 + cmd->max_args]);
        return EXIT_USAGE;
    }
    *args = argv + 1;
    *n_args = n;
    return -1;
}
