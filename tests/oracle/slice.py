"""A slice of the model with released widths and random weights, for tests against transformers.

    cfg, weights = slice.make('mixed', directory, slice.RELEASED, 'cuda')

writes a checkpoint (config.json, safetensors, index) in one of the layouts and returns the configuration of its text
model and the same weights decoded, by transformers' parameter names, as bfloat16 tensors. Scales are powers of two, so
that every decoded value is exact in bfloat16 and both engines compute with the same weights.

Needs torch; qx must not be needed here: quantising is written out plainly.
"""
import json
import math
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / 'gen'))
import big  # noqa: E402
import t0  # noqa: E402
from t0 import L, NG, PLE  # noqa: E402

RELEASED = dict(layers=4, experts=512, hidden=2560, inter=640, vocab=65536, lowrank=320, n_heads=24, n_kv=2,
                head_dim=256, k_heads=16, v_heads=48, gdn_dim=128, i_heads=4, i_dim=128, budget=2048, topk=10,
                ple_dim=2560, ngram_base=20000, shards=8)
# The same shape in small, to try the scripts on a machine without a GPU.
SMALL = dict(layers=4, experts=16, hidden=256, inter=128, vocab=2048, lowrank=32, n_heads=4, n_kv=2,
             head_dim=64, k_heads=2, v_heads=4, gdn_dim=64, i_heads=2, i_dim=64, budget=64, topk=4,
             ple_dim=256, ngram_base=500, shards=4)
EOS = 1
CODES = {torch.uint8: 'U8', torch.float8_e4m3fn: 'F8_E4M3', torch.bfloat16: 'BF16', torch.float32: 'F32',
         torch.int64: 'I64'}
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)     # between 0, .5, 1, 1.5, 2, 3, 4, 6


def power_of_two_above(x):
    return 2.0 ** math.ceil(math.log2(float(x)))


def e2m1_value(code):
    return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=code.device)[code.long()]


def nvfp4(w):
    """[..., n] float32 -> packed codes, E4M3 scales, global scale (float), decoded bfloat16."""
    amax = w.abs().unflatten(-1, (-1, 16)).amax(-1)
    glob = power_of_two_above(amax.amax() / (6 * 448))
    scale = (amax / (6 * glob)).clamp(2.0 ** -6, 448).to(torch.float8_e4m3fn)
    s = scale.float() * glob
    x = w.unflatten(-1, (-1, 16)) / s.unsqueeze(-1)
    code = torch.bucketize(x.abs(), torch.tensor(MIDPOINTS, device=w.device)).to(torch.uint8)
    value = torch.copysign(e2m1_value(code), x) * s.unsqueeze(-1)
    code = (code | (x < 0).to(torch.uint8) << 3).flatten(-2)
    packed = code[..., 0::2] | code[..., 1::2] << 4
    return packed.contiguous(), scale, glob, value.flatten(-2).to(torch.bfloat16)


def mxfp8(w):
    """[rows, n] float32 -> E4M3 codes, E8M0 scales (bytes), decoded bfloat16."""
    x = w.unflatten(-1, (-1, 32))
    e = torch.floor(torch.log2(x.abs().amax(-1).clamp_min(2.0 ** -100))) - 8
    s = torch.exp2(e).unsqueeze(-1)
    code = (x / s).clamp(-448, 448).to(torch.float8_e4m3fn)
    value = (code.float() * s).flatten(-2).to(torch.bfloat16)
    return code.flatten(-2), (e + 127).to(torch.uint8), value


class Writer:
    """Safetensors files, written tensor by tensor from host copies of large pieces."""

    def __init__(self, directory):
        self.dir = pathlib.Path(directory)
        self.dir.mkdir(parents=True, exist_ok=True)
        self.parts, self.map, self.total, self.n_files = {}, {}, 0, 0

    def put(self, name, t):
        self.parts[name] = (CODES[t.dtype], list(t.shape), t)

    def put_each(self, names, t):
        """t[i] becomes names[i]; one copy to the host for all."""
        host = t.contiguous().cpu()
        for i, n in enumerate(names):
            self.parts[n] = (CODES[t.dtype], list(t.shape[1:]), host[i])

    def flush(self):
        name = f'model-{self.n_files:05d}.safetensors'
        self.n_files += 1
        head, at, raw = {}, 0, []
        for n, (dtype, shape, t) in self.parts.items():
            b = t.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
            head[n] = {'dtype': dtype, 'shape': shape, 'data_offsets': [at, at + b.size]}
            at += b.size
            raw.append(b)
            self.map[n] = name
        text = json.dumps(head).encode()
        text += b' ' * (-len(text) % 8)
        with open(self.dir / name, 'wb', buffering=1 << 24) as f:
            f.write(len(text).to_bytes(8, 'little') + text)
            for b in raw:
                f.write(b)
        self.total += at
        self.parts = {}

    def finish(self):
        if self.parts:
            self.flush()
        t0.write_json(self.dir / 'model.safetensors.index.json',
                      {'metadata': {'total_size': self.total}, 'weight_map': self.map})


def config(layout, g):
    """config.json of the slice as a dict: the released one with the slice's numbers, text model only."""
    big.LAYERS, big.EXPERTS, big.HID, big.INTER, big.VOCAB = g['layers'], g['experts'], g['hidden'], g['inter'], g['vocab']
    big.WIDE = 4 * g['hidden']
    c = big.config(layout)
    t = c['text_config']
    t.update(hc_lowrank=g['lowrank'], head_dim=g['head_dim'], num_attention_heads=g['n_heads'],
             num_key_value_heads=g['n_kv'], linear_key_head_dim=g['gdn_dim'], linear_value_head_dim=g['gdn_dim'],
             linear_num_key_heads=g['k_heads'], linear_num_value_heads=g['v_heads'], indexer_n_heads=g['i_heads'],
             indexer_head_dim=g['i_dim'], indexer_budget=g['budget'], num_experts_per_tok=g['topk'],
             ple_embed_dim=g['ple_dim'], ngram_vocab_size_base=g['ngram_base'], split_ngram_parts=g['shards'],
             shared_expert_intermediate_size=g['inter'], bos_token_id=EOS, eos_token_id=EOS, mtp_num_hidden_layers=0,
             max_position_embeddings=8192)
    half = int(g['head_dim'] * 0.25) // 2
    t['rope_parameters']['mrope_section'] = [half - 2 * (half // 3), half // 3, half // 3]
    for key in ('mtp', 'mtp_use_dedicated_embeddings'):
        t.pop(key, None)
    for key in ('vision_config', 'image_token_id', 'video_token_id', 'vision_start_token_id', 'vision_end_token_id'):
        c.pop(key, None)
    return c


def quantization(layout, linears):
    quant, hf = big.quantization(layout, linears)
    for q in (quant, hf, hf.get('quantization', {})):
        layers = q.get('quantized_layers', {})
        for k in [k for k in layers if k.startswith(('mtp', 'model.visual'))]:
            del layers[k]
    return quant, hf


class Maker:
    def __init__(self, layout, directory, g, device, seed):
        self.layout, self.g, self.dev = layout, g, device
        self.mx = layout == 'nvfp4-ple'
        self.rng = torch.Generator(device=device).manual_seed(seed)
        self.w, self.sd, self.linears = Writer(directory), {}, []

    def normal(self, *shape, std=1.0):
        return torch.randn(*shape, generator=self.rng, device=self.dev) * std

    def theirs(self, name):
        return name.replace('model.language_model.', 'model.')

    def plain(self, name, value):
        v = value.to(torch.bfloat16)
        self.w.put(name, v)
        self.sd[self.theirs(name)] = v

    def norm(self, name, n, one=False):
        self.plain(name, self.normal(n, std=0.1) + (1.0 if one else 0.0))

    def lin(self, module, out, inn, gain=1.0, v=None):
        """Values of unit variance give values of variance gain^2; v: these values instead."""
        self.linears.append(module)
        v = self.normal(out, inn, std=gain / math.sqrt(inn)) if v is None else v
        if self.mx and module.endswith(big.MXFP8_PARTS):
            code, scale, value = mxfp8(v)
            self.w.put(module + '.weight', code)
            self.w.put(module + '.weight_scale', scale)
            self.sd[self.theirs(module + '.weight')] = value
        else:
            self.plain(module + '.weight', v)

    def mixer(self, p, inject):
        wide = 4 * self.g['hidden']
        self.norm(p + 'hc_norm.weight', wide)
        self.lin(p + 'input_mix_weight_down', self.g['lowrank'], wide, 4.0)
        self.lin(p + 'input_mix_weight_up', wide, self.g['lowrank'], 2.0)
        if inject:
            self.lin(p + 'block_inject_weight', 4, wide, 2.0)

    def attention(self, p):
        g = self.g
        heads, kv = g['n_heads'] * g['head_dim'], g['n_kv'] * g['head_dim']
        for m, o, i in (('q_proj', 2 * heads, g['hidden']), ('k_proj', kv, g['hidden']), ('v_proj', kv, g['hidden']),
                        ('o_proj', g['hidden'], heads)):
            self.lin(p + m, o, i, 3.0 if m in ('v_proj', 'o_proj') else 1.0)
        # The first half of the index heads resemble the key, and tokens resemble each other (embed_tokens), so that
        # scores are positive: between blocks of score 0 there are only ties, which no engine need break alike.
        v = self.normal(g['i_heads'] + 1, g['i_dim'], g['hidden'], std=1 / math.sqrt(g['hidden']))
        v[:g['i_heads'] // 2] = 0.6 * v[:g['i_heads'] // 2] + 0.8 * v[-1]
        self.lin(p + 'indexer.index_qk_proj', (g['i_heads'] + 1) * g['i_dim'], g['hidden'], v=v.flatten(0, 1))
        for m, n in (('q_norm', g['head_dim']), ('k_norm', g['head_dim']), ('indexer.q_layernorm', g['i_dim']),
                     ('indexer.k_layernorm', g['i_dim'])):
            self.norm(p + m + '.weight', n)

    def gdn(self, p):
        g = self.g
        keys, values = g['k_heads'] * g['gdn_dim'], g['v_heads'] * g['gdn_dim']
        for m, o, i in (('in_proj_qkv', 2 * keys + values, g['hidden']), ('in_proj_z', values, g['hidden']),
                        ('in_proj_a', g['v_heads'], g['hidden']), ('in_proj_b', g['v_heads'], g['hidden']),
                        ('out_proj', g['hidden'], values)):
            self.lin(p + m, o, i, 2.0 if m == 'in_proj_qkv' else 1.0)
        self.plain(p + 'conv1d.weight', self.normal(2 * keys + values, 1, 4, std=0.5))
        self.plain(p + 'A_log', torch.log(torch.rand(g['v_heads'], generator=self.rng, device=self.dev) * 2 + 0.02))
        self.plain(p + 'dt_bias', self.normal(g['v_heads'], std=0.5) - 1)
        self.norm(p + 'norm.weight', g['gdn_dim'], one=True)

    def moe(self, p):
        g = self.g
        e, h, n = g['experts'], g['hidden'], g['inter']
        self.lin(p + 'gate', e, h, 2.0)
        for m, o, i in (('gate_proj', n, h), ('up_proj', n, h), ('down_proj', h, n)):
            self.lin(p + 'shared_expert.' + m, o, i, 1.5)
        self.lin(p + 'shared_expert_gate', 1, h)
        decoded = {}
        one = torch.ones((), device=self.dev)
        for m, o, i in (('gate_proj', n, h), ('up_proj', n, h), ('down_proj', h, n)):
            packed, scale, glob, value = nvfp4(self.normal(e, o, i, std=2.0 / math.sqrt(i)))
            names = [f'{p}experts.{k}.{m}' for k in range(e)]
            self.w.put_each([s + '.weight' for s in names], packed)
            self.w.put_each([s + '.weight_scale' for s in names], scale)
            self.w.put_each([s + '.weight_scale_2' for s in names], one.expand(e) * glob)
            self.w.put_each([s + '.input_scale' for s in names], one.expand(e))
            decoded[m] = value
        q = self.theirs(p) + 'experts.'
        self.sd[q + 'gate_up_proj'] = torch.cat((decoded['gate_proj'], decoded['up_proj']), 1)
        self.sd[q + 'down_proj'] = decoded['down_proj']

    def table(self):
        g = self.g
        width = g['ple_dim'] // 16
        sizes = t0.primes_from(g['ngram_base'], 16)
        rows = -(-sum(sizes) // 128) * 128
        q = PLE + 'ple_embedding.'
        for name, values in (('layer_multipliers', t0.hash_multipliers(g['vocab'], 3)),
                             ('ngram_heads_vocab_sizes', sizes),
                             ('ngram_heads_offsets', [sum(sizes[:i]) for i in range(16)])):
            self.w.put(q + name, torch.tensor(values, dtype=torch.int64))   # transformers computes its own
        wide = 4 * g['hidden']
        self.lin(PLE + 'key_proj', wide, g['ple_dim'])
        self.lin(PLE + 'value_proj', g['hidden'], g['ple_dim'])
        for name in ('norm_key', 'norm_query', 'norm_conv'):
            self.norm(f'{PLE}{name}.weight', wide)
        self.plain(PLE + 'conv1d.weight', self.normal(wide, 1, 4, std=0.3))
        v = self.normal(rows, width)
        if self.mx:
            packed, scale, glob, value = nvfp4(v)
            tail = (('weight_scale_2', torch.tensor([glob])),)
            stored = (('weight', packed), ('weight_scale', scale))
        else:
            glob = power_of_two_above(v.abs().amax() / 448)
            code = (v / glob).to(torch.float8_e4m3fn)
            value = (code.float() * glob).to(torch.bfloat16)
            tail = (('weight_scale', torch.tensor([glob], dtype=torch.bfloat16)),)
            stored = (('weight', code),)
        step = rows // g['shards']
        for name, t in stored:
            for i in range(g['shards']):
                self.w.put(f'{NG}shard_{i}.{name}', t[i * step:(i + 1) * step])
        for name, t in tail:
            self.w.put(NG + name, t)
        self.sd[self.theirs(NG) + 'weight'] = value

    def all(self):
        g = self.g
        self.plain('lm_head.weight', self.normal(g['vocab'], g['hidden'], std=1 / math.sqrt(g['hidden'])))
        self.plain(L + 'embed_tokens.weight', self.normal(g['vocab'], g['hidden']) + 1.5 * self.normal(1, g['hidden']))
        self.mixer(L + 'hyper_connection_mixer.', False)
        self.table()
        self.w.flush()
        for n in range(g['layers']):
            p = f'{L}layers.{n}.'
            self.mixer(p + 'attn_hyper_connection.', True)
            self.mixer(p + 'mlp_hyper_connection.', True)
            if n % 4 == 3:
                self.attention(p + 'self_attn.')
            else:
                self.gdn(p + 'linear_attn.')
            self.moe(p + 'mlp.')
            self.w.flush()


def make(layout, directory, g, device, seed=1):
    m = Maker(layout, directory, g, device, seed)
    c = config(layout, g)
    with torch.no_grad():
        m.all()
    m.w.finish()
    quant, hf = quantization(layout, m.linears)
    c['quantization_config'] = quant
    t0.write_json(m.w.dir / 'config.json', c)
    t0.write_json(m.w.dir / 'hf_quant_config.json', hf)
    return c['text_config'], m.sd


def transformers_model(text, weights, dtype, device, **how):
    """transformers' model with these weights in this dtype."""
    from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextConfig
    t = {k: v for k, v in text.items() if k not in ('model_type', 'dtype', 'torch_dtype')}
    cfg = Qwen4ExpTextConfig(**t)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen4ExpForCausalLM._from_config(cfg, **how)
    finally:
        torch.set_default_dtype(before)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [k for k in missing if not k.endswith(('layer_multipliers', 'ngram_heads_vocab_sizes',
                                                     'ngram_heads_offsets'))]
    if missing or unexpected:
        raise SystemExit(f'weights do not fit: missing {missing[:5]}, unexpected {unexpected[:5]}')
    return model.eval()
