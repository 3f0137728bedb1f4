/* run.c: the options of qx-run and which mode they ask for. */
#include "run.h"

#include "exit_code.h"
#include "signals.h"

#include <stdlib.h>
#include <string.h>

static const char *const effort_words[] = {"low", "medium", "xhigh", NULL};
static const char *const template_words[] = {"qwen3.8", NULL};
static const char *const table_words[] = {"device", "host", "disk", NULL};

static struct run R;
#define O R.o

static const struct opt run_options[] = {
    {OPT_GROUP, .help = "Prompt"},
    {OPT_STR, 'p', "prompt", "TEXT", &O.prompt, &O.prompt_given, "prompt: a user turn, or as it is "
     "without a chat template"},
    {OPT_STR, 0, "prompt-file", "FILE", &O.prompt_file, &O.prompt_file_given, "prompt from a file; - "
     "for standard input"},
    {OPT_LIST, 0, "tokens", "LIST", &O.tokens, &O.tokens_given, "prompt as token ids, as they are",
     .kind = "token-range"},
    {OPT_STR, 0, "batch", "FILE", &O.batch, &O.batch_given, "many prompts, JSON lines; - for standard "
     "input"},
    {OPT_FLAG, 0, "raw", 0, &O.raw, 0, "send the text as it is, without a chat template"},
    {OPT_STR, 0, "system", "TEXT", &O.system, &O.system_given, "system message"},
    {OPT_FLAG, 0, "no-think", 0, &O.no_think, &O.no_think_given, "answer without thinking first"},
    {OPT_CHOICE, 0, "effort", "WORD", &O.effort, &O.effort_given, "thinking: low, medium or xhigh (the "
     "default)", effort_words},
    {OPT_CHOICE, 0, "template", "NAME", &O.template_name, 0, "render with this template whatever the "
     "checkpoint has: qwen3.8", template_words},
    {OPT_FLAG, 0, "show-prompt", 0, &O.show_prompt, 0, "print the rendered prompt and run nothing"},

    {OPT_GROUP, .help = "Generation"},
    {OPT_U64, 'n', "max-tokens", "N", &O.n, &O.n_given, "generate at most N tokens; 0 only tokenizes"},
    {OPT_FLAG, 0, "greedy", 0, &O.greedy, 0, "always the most probable token"},
    {OPT_F64, 0, "temperature", "T", &O.temperature, &O.temperature_given, "sampling temperature; 0 is "
     "greedy"},
    {OPT_U64, 0, "top-k", "K", &O.top_k, &O.top_k_given, "sample among the K most probable; 0 is off"},
    {OPT_F64, 0, "top-p", "P", &O.top_p, &O.top_p_given, "sample among the most probable that together "
     "have P; 1 is off"},
    {OPT_F64, 0, "min-p", "P", &O.min_p, &O.min_p_given, "leave out what is less than P times as "
     "probable as the best; 0 is off"},
    {OPT_STR, 0, "seed", "N", &O.seed, 0, "seed of sampling (default 0), or 'random'"},
    {OPT_F64, 0, "repeat-penalty", "R", &O.repeat_penalty, &O.repeat_given, "divide the logits of seen "
     "tokens; 1 is off"},
    {OPT_F64, 0, "presence-penalty", "X", &O.presence_penalty, 0, "subtract once for a seen token"},
    {OPT_F64, 0, "frequency-penalty", "X", &O.frequency_penalty, 0, "subtract for every occurrence of a "
     "token"},
    {OPT_U64, 0, "penalty-last-n", "N", &O.penalty_last_n, 0, "penalties look at the last N tokens; 0 "
     "is all"},
    {OPT_STRS, 0, "stop", "TEXT", &O.stops, 0, "end before this text; may be given several times"},
    {OPT_FLAG, 0, "ignore-eos", 0, &O.ignore_eos, 0, "go on after stop ids"},
    {OPT_FLAG, 0, "special", 0, &O.special, 0, "show special tokens in the text"},

    {OPT_GROUP, .help = "Device and memory"},
    {OPT_STR, 0, "device", "DEV", &O.device, 0, "cpu, cuda or cuda:N (default: cuda if there is one)"},
    {OPT_U64, 0, "gpus", "N", &O.gpus, 0, "number of devices (1)"},
    {OPT_CHOICE, 0, "table", "PLACE", &O.table, 0, "where the n-gram table lies: device, host or disk",
     table_words},
    {OPT_SIZE, 0, "device-memory", "SIZE", &O.device_memory, &O.device_memory_given, "plan within this "
     "much device memory"},
    {OPT_U64, 0, "ctx", "N", &O.ctx, &O.ctx_given, "context in tokens"},
    {OPT_U64, 0, "chunk", "N", &O.chunk, &O.chunk_given, "tokens of a prefill step"},
    {OPT_STR, 0, "draft", "K", &O.draft, 0, "MTP drafts a round, 0 to 8, or 'auto' (default 0)"},
    {OPT_F64, 0, "draft-min-prob", "P", &O.draft_min_prob, 0, "end a chain of drafts early below this "
     "probability"},
    {OPT_STR, 0, "draft-vocab", "N|FILE", &O.draft_vocab, 0, "choose drafts among the N most frequent ids of "
     "the prompt, or the ids of FILE"},
    {OPT_U64, 0, "streams", "N", &O.streams, &O.streams_given, "sequences at one time with --batch"},
    {OPT_FLAG, 0, "precise", 0, &O.precise, 0, "f32 activations"},

    {OPT_GROUP, .help = "Numbers"},
    {OPT_STR, 0, "logits", "FILE", &O.logits, 0, "write rows of logits, .npy"},
    {OPT_STR, 0, "draft-logits", "FILE", &O.draft_logits, 0, "write rows of the draft head's logits, "
     ".npy"},
    {OPT_LIST, 0, "positions", "LIST", &O.positions, &O.positions_given, "which positions to write",
     .kind = "position-range"},
    {OPT_FLAG, 0, "force", 0, &O.force, 0, "replace existing files of logits"},
    {OPT_U64, 0, "logprobs", "N", &O.logprobs, 0, "with --json: the N most probable tokens at each "
     "step"},
    OPT_COMMON(R.common),
    {.type = OPT_END},
};

static const struct opt_command command = {
    .name = "run",
    .synopsis = "qx run PATH [-p TEXT | --prompt-file FILE | --tokens LIST | --batch FILE] [OPTION]...\n",
    .summary = "Generate text. Without a prompt, on a terminal: chat.",
    .examples = "  qx run sample -p 'In the beginning' -n 64\n"
                "  qx run sample --raw --prompt-file - --greedy -n 32 < text.txt\n"
                "  qx run sample --tokens 5,6,7 -n 4 --json\n"
                "  qx run sample -p 'And it came to pass' -n 0\n"
                "  qx run MODEL --system 'You are concise.' --no-think -p 'Hello?'\n",
    .opts = run_options,
    .min_args = 1,
    .max_args = 1,
};

int main(int argc, char **argv)
{
    char **args;
    int n_args, code;
    R.o.gpus = 1;
    R.o.repeat_penalty = 1;
    int rc = opt_parse(&command, argc, argv, &args, &n_args);
    if (rc >= 0) {
        return rc;
    }
    R.path = args[0];
    ui_init(&R.ui, "qx-run", &R.common);
    signals_init();
    rc = run_check_options(&R);
    if (rc) {
        code = ui_fail(&R.ui, &R.err);
    } else if (R.o.batch_given) {
        code = run_batch(&R);
    } else if (R.o.prompt_given || R.o.prompt_file_given || R.o.tokens_given) {
        code = run_one(&R);
    } else {
        code = run_chat(&R);
    }
    bool interrupted = R.err.code == QX_E_INTERRUPTED;
    run_close(&R);
    code = ui_finish(&R.ui, code);
    int sig = signals_pending();
    if (sig && (interrupted || code == EXIT_OK)) {
        signals_reraise(sig);
    }
    return code;
}
