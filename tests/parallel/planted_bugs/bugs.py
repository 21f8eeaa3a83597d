"""Bugs that training systems of this kind have had, as edits of this repository's sources: the table of run.py.

An edit replaces a text that occurs once in its file, however it is broken into lines. In the new text PLANTED is true while the bug is
switched on, so that all bugs can be compiled at once and still be tried one at a time. `rows` are the layouts of the equivalence matrix
that are tried first, `prove` the configurations of `megatron prove`; when those say nothing, all of them are. A bug in what the matrix
cannot have (it computes in fp64 and fp32) names in place of rows a `unit_test`, "program:Suite.Name", which must fail, or `unmatched`, why
only `prove` can see it; one that only
rounds more, in place of proofs, by how much.
"""
from dataclasses import dataclass

from audio_bugs import AUDIO_BUGS
from gpu_bugs import GPU_BUGS
from hybrid_bugs import HYBRID_BUGS
from media_bugs import MEDIA_BUGS
from multimodal_bugs import MULTIMODAL_BUGS
from padding_bugs import PADDING_BUGS, UNPADDED_ROWS
from retro_bugs import RETRO_BUGS
from serving_bugs import SERVING_BUGS
from ssm_bugs import SSM_BUGS
from stack_bugs import STACK_BUGS
from vision_bugs import VISION_BUGS

TP, PP, CP = "--tensor-model-parallel-size ", "--pipeline-model-parallel-size ", "--context-parallel-size "
SP = "--sequence-parallel "
VPP = "--num-virtual-stages-per-pipeline-rank "
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
ZERO2 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads "
ZERO3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather "

# What somebody would ask `prove` about: a name, the number of ranks, flags of a run.
GPT = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
LLAMA = ("--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
         "--seq-length 8192 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
         "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 ")
QWEN = ("--num-layers 28 --hidden-size 1536 --ffn-hidden-size 8960 --num-attention-heads 12 --group-query-attention --num-query-groups 2 "
        "--seq-length 4096 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias --qk-layernorm "
        "--attention-dropout 0 --hidden-dropout 0.1 --reset-position-ids --reset-attention-mask --eod-mask-loss ")
GEMMA = ("--num-layers 34 --hidden-size 2560 --ffn-hidden-size 10240 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
         "--kv-channels 256 --seq-length 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-base-local 10000 "
         "--normalization RMSNorm --geglu --disable-bias-linear --norm-placement sandwich --qk-layernorm --window-size 1023 0 "
         "--window-attn-skip-freq 6 --attention-dropout 0 --hidden-dropout 0 ")
LATENT = ("--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --seq-length 4096 --multi-latent-attention "
          "--q-lora-rank 768 --kv-lora-rank 512 --qk-layernorm --position-embedding-type rope --rotary-scaling-factor 40 --mscale 0.707 "
          "--mscale-all-dim 0.707 --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
          "--attention-dropout 0 --hidden-dropout 0 ")
BERT = GPT.replace("--seq-length 1024", "--seq-length 512") + "--task bert "
MODERN = BERT + ("--bert-no-binary-head --bert-no-head-bias --bert-embedding-norm --position-embedding-type rope --rotary-base-local 10000 "
                 "--rotary-base 160000 --window-size 64 64 --window-attn-skip-freq [0,1,1]*8 --exact-geglu --disable-bias-linear "
                 "--disable-norm-bias --no-first-input-norm ")
T5 = GPT.replace("--seq-length 1024", "--seq-length 512") + "--task t5 --decoder-num-layers 12 --decoder-seq-length 256 "
RETRO = GPT + "--task retro "
LLAVA = LLAMA + ("--task mimo --vision-model-type clip --disable-vision-class-token --image-token-id 32000 ")
GEMMA3 = LLAMA + ("--task mimo --vision-model-type siglip --img-h 896 --img-w 896 --vision-pooling 4 --disable-vision-class-token "
                  "--vision-projection-type affine --vision-projection-norm --bidirectional-images --image-token-id 32000 ")
QWEN2_VL = LLAMA + ("--task mimo --vision-model-type qwen2 --pixel-shuffle --disable-vision-class-token --image-token-id 32000 "
                    "--position-embedding-type mrope --mrope-section 16 24 24 ")
RELATIVE = "--position-embedding-type relative "
LETTERS = GPT.replace("--num-layers 24", "--hybrid-layer-pattern *-*--*|-*--*-*-|--*-*-|*-*-")
NEMOTRON = ("--hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- --hidden-size 4096 --ffn-hidden-size 21504 "
            "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --mamba-num-heads 128 --seq-length 8192 "
            "--position-embedding-type none --normalization RMSNorm --squared-relu --disable-bias-linear "
            "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --reset-position-ids --reset-attention-mask "
            "--eod-mask-loss ")
QWEN_NEXT = ("--hybrid-layer-pattern " + 8 * "G-G-G-*-" + " --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 16 "
             "--group-query-attention --num-query-groups 4 --kv-channels 256 --attention-output-gate --seq-length 8192 "
             "--position-embedding-type rope --rotary-percent 0.25 --normalization RMSNorm --swiglu --disable-bias-linear "
             "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --reset-position-ids --reset-attention-mask "
             "--eod-mask-loss ")
EP, ETP = "--expert-model-parallel-size ", "--expert-tensor-parallel-size "
MIXTRAL = LLAMA + "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
DEEPSEEK = LATENT + ("--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-router-score-function sigmoid "
                     "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 2816 --moe-shared-expert-gate "
                     "--moe-layer-freq [0]+[1]*26 --moe-token-dispatcher-type alltoall ")
BALANCE, FULL = "--moe-router-load-balancing-type ", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe delayed"
BATCH = "--micro-batch-size 2 --global-batch-size 96 "
GROWS = '--step-batch-size-schedule "0:16 1M:96" '
PROOFS = {
    "gpt tp2": (2, GPT + BATCH + TP + "2"),
    "latent tp2": (2, LATENT + BATCH + TP + "2"),
    "latent cp2": (2, LATENT + BATCH + CP + "2"),
    "gpt tp2 sp": (2, GPT + BATCH + TP + "2 " + SP),
    "gpt tp2 sp documents": (2, GPT + BATCH + TP + "2 " + SP + "--reset-position-ids --reset-attention-mask"),
    "gpt pp2": (2, GPT + BATCH + PP + "2"),
    "mamba tp2": (2, NEMOTRON + BATCH + TP + "2"),
    "mamba tp4 group": (4, NEMOTRON + BATCH + TP + "4 --mamba-num-groups 1"),
    "mamba tp4 groups2": (4, NEMOTRON + BATCH + TP + "4 --mamba-num-groups 2"),
    "mamba dp2": (2, NEMOTRON + BATCH),
    "delta tp2": (2, QWEN_NEXT + BATCH + TP + "2"),
    "delta cp2": (2, QWEN_NEXT + BATCH + CP + "2"),
    "delta pp2 norm again": (2, QWEN_NEXT + BATCH + PP + "2 --recompute-granularity selective --recompute-modules gdn_norm_out"),
    "mamba cp2": (2, NEMOTRON + BATCH + CP + "2"),
    "letters pp2 vpp2": (2, LETTERS + BATCH + PP + "2"),
    "gpt pp2 zb-h1": (2, GPT + BATCH + PP + "2 --pipeline-schedule zb-h1"),
    "gpt pp2 dp2 zero1": (4, GPT + BATCH + PP + "2 " + ZERO1),
    "gpt pp2 dp2 zero1 late": (4, GPT + BATCH + PP + "2 --use-distributed-optimizer"),
    "gpt dp2 means": (2, GPT + BATCH + "--no-calculate-per-token-loss"),
    "gpt dp4 zero1 instances": (4, GPT + BATCH + ZERO1 + "--num-distributed-optimizer-instances 2"),
    "llama tp2": (2, LLAMA + BATCH + TP + "2"),
    "llama tp2 lora": (2, LLAMA + BATCH + TP + "2 --lora-rank 16"),
    "gpt cp2 gather": (2, GPT + BATCH + CP + "2 --cp-comm-type all_gather"),
    "gpt cp2 a2a": (2, GPT + BATCH + CP + "2 --cp-comm-type a2a"),
    "llama cp2": (2, LLAMA + BATCH + CP + "2"),
    "llama cp2 window": (2, LLAMA + BATCH + CP + "2 --cp-comm-type all_gather --window-size 1024 0"),
    "llama cp2 a2a": (2, LLAMA + BATCH + CP + "2 --cp-comm-type a2a"),
    "llama cp2 sinks": (2, LLAMA + BATCH + CP + "2 --softmax-type learnable"),
    "llama cp2 gather sinks": (2, LLAMA + BATCH + CP + "2 --cp-comm-type all_gather --softmax-type learnable"),
    "llama cp2 a2a sinks": (2, LLAMA + BATCH + CP + "2 --cp-comm-type a2a --softmax-type learnable"),
    "llama tp2 cp8 a2a": (16, LLAMA + BATCH + TP + "2 " + CP + "8 --cp-comm-type a2a"),
    "qwen cp4 a2a": (4, QWEN + BATCH + CP + "4 --cp-comm-type a2a"),
    "gpt cp4 hierarchy": (4, GPT + BATCH + CP + "4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
    "gpt cp2": (2, GPT + BATCH + CP + "2"),
    "llama dp4 zero3 instances": (4, LLAMA + BATCH + ZERO3 + "--num-distributed-optimizer-instances 2"),
    "llama pp2 vpp2": (2, LLAMA + BATCH + PP + "2 " + VPP + "2"),
    "gemma pp2": (2, GEMMA + BATCH + PP + "2"),
    "gemma pp2 vpp2": (2, GEMMA + BATCH + PP + "2 " + VPP + "2 --num-layers 36"),
    "llama dp4 zero1": (4, LLAMA + BATCH + ZERO1),
    "llama dp2 zero2": (2, LLAMA + BATCH + ZERO2),
    "llama dp2 zero3": (2, LLAMA + BATCH + ZERO3),
    "qwen tp4 sp": (4, QWEN + BATCH + TP + "4 " + SP),
    "qwen cp2": (2, QWEN + BATCH + CP + "2"),
    "qwen cp2 means": (2, QWEN + BATCH + CP + "2 --no-calculate-per-token-loss"),
    "qwen cp2 dp2": (4, QWEN + BATCH + CP + "2"),
    "qwen dp2": (2, QWEN + BATCH),
    "gpt dp2 bf16": (2, GPT + BATCH + "--bf16"),
    "llama dp2 zero1 bf16": (2, LLAMA + BATCH + ZERO1 + "--bf16"),
    "gpt dp2 zero1 bf16 sums": (2, GPT + BATCH + ZERO1 + "--bf16 --grad-reduce-in-bf16"),
    "llama dp4 zero2 instances bf16 sums": (4, LLAMA + BATCH + ZERO2 + "--num-distributed-optimizer-instances 2 --bf16 --grad-reduce-in-bf16"),
    "gpt tp2 sp bf16": (2, GPT + BATCH + TP + "2 " + SP + "--bf16"),
    "llama tp2 fp16": (2, LLAMA + BATCH + TP + "2 --fp16"),
    "gpt pp2 fp16": (2, GPT + BATCH + PP + "2 --fp16"),
    "llama tp2 dp2 zero1 narrow": (4, LLAMA + BATCH + TP + "2 " + ZERO1 + "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16"),
    "llama cp2 sft": (2, LLAMA + BATCH + CP + "2 --task sft"),
    "llama cp4 sft": (4, LLAMA + BATCH + CP + "4 --task sft"),
    "llama tp2 cp2 dp2 sft": (8, LLAMA + BATCH + TP + "2 " + CP + "2 --task sft"),
    "qwen hybrid cp": (4, QWEN + BATCH + "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 2048"),
    "llama cp2 dpo": (2, LLAMA + BATCH + CP + "2 --task dpo"),
    "llama pp2 cp2 vocabulary": (4, LLAMA + BATCH + PP + "2 " + CP + "2 --pipeline-vocab-parallel"),
    "llama dp2 cosine": (2, LLAMA + BATCH + "--lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-4"),
    "llama dp2 wsd": (2, LLAMA + BATCH + "--lr-decay-style WSD --lr-wsd-decay-iters 3"),
    "gpt pp2 decoupled": (2, GPT + BATCH + PP + "2 --decoupled-lr 1e-2"),
    "gpt dp2 full validation": (2, GPT + BATCH + "--full-validation"),
    "gpt pp3 uneven": (3, GPT + BATCH + PP + "3 --num-layers 7 --decoder-first-pipeline-num-layers 3"),
    "gpt cp2 mtp": (2, GPT + BATCH + CP + "2 --mtp-num-layers 1"),
    "llama pp2 mtp": (2, LLAMA + BATCH + PP + "2 --mtp-num-layers 2"),
    "qwen cp2 mtp": (2, QWEN + BATCH + CP + "2 --mtp-num-layers 2"),
    "mixtral ep2": (2, MIXTRAL + BATCH + EP + "2"),
    "mixtral ep2 allgather": (2, MIXTRAL + BATCH + EP + "2 --moe-token-dispatcher-type allgather"),
    "mixtral ep2 rounds": (2, MIXTRAL + BATCH + EP + "2 --moe-expert-rank-capacity-factor 1"),
    "mixtral tp2 ep2 etp2": (4, MIXTRAL + BATCH + TP + "2 " + SP + EP + "2 " + ETP + "2"),
    "mixtral tp2 ep2 etp2 flex": (4, MIXTRAL + BATCH + TP + "2 " + SP + EP + "2 " + ETP + "2 --moe-token-dispatcher-type flex"),
    "latent tp2 lora": (2, LATENT + BATCH + TP + "2 " + SP + "--lora-rank 16"),
    "mixtral tp2": (2, MIXTRAL + BATCH + TP + "2 " + SP),
    "mixtral tp2 ep2": (2, MIXTRAL + BATCH + TP + "2 " + SP + EP + "2 " + ETP + "1"),
    "mixtral dp4 ep2": (4, MIXTRAL + BATCH + EP + "2"),
    "mixtral dp4 ep2 zero1": (4, MIXTRAL + BATCH + EP + "2 " + ZERO1),
    "mixtral tp2 cp2 losses": (4, MIXTRAL + BATCH + TP + "2 " + SP + CP + "2 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.05"),
    "mixtral ep2 global": (2, MIXTRAL + BATCH + EP + "2 " + FULL + BALANCE + "global_aux_loss --moe-aux-loss-coeff 0.1"),
    "mixtral cp2 sequence": (2, MIXTRAL + BATCH + CP + "2 " + BALANCE + "seq_aux_loss --moe-aux-loss-coeff 0.1"),
    "mixtral tp2 jitter": (2, MIXTRAL + BATCH + TP + "2 " + SP + "--moe-input-jitter-eps 0.1"),
    "mixtral tp2 forced": (2, MIXTRAL + BATCH + TP + "2 " + SP + "--moe-router-force-load-balancing"),
    "mixtral pp2 dense stage": (2, MIXTRAL + BATCH + PP + "2 --num-layers 4 --moe-layer-freq [0]*2+[1]*2 --moe-aux-loss-coeff 0.1"),
    "deepseek tp2": (2, DEEPSEEK + BATCH + TP + "2 " + SP),
    "deepseek dp2": (2, DEEPSEEK + BATCH),
    "llama tp2 lora bf16": (2, LLAMA + BATCH + TP + "2 --lora-rank 16 --bf16"),
    "gpt dp2 grows": (2, GPT + "--micro-batch-size 2 " + GROWS),
    "gpt dp2 evaluates more": (2, GPT + BATCH + "--eval-micro-batch-size 4 --eval-global-batch-size 192"),
    "llama pp2 fp8 edges": (2, LLAMA + BATCH + PP + "2 --first-last-layers-bf16 " + FP8),
    "llama pp2 mtp repeated": (2, LLAMA + BATCH + PP + "2 --mtp-num-layers 2 --mtp-use-repeated-layer"),
    "mixtral ep2 capacity": (2, MIXTRAL + BATCH + EP + "2 --moe-expert-capacity-factor 1"),
    "bert tp2": (2, BERT + BATCH + TP + "2"),
    "bert tp2 sp": (2, BERT + BATCH + TP + "2 " + SP),
    "bert residual tp2 sp": (2, BERT + BATCH + TP + "2 " + SP + "--norm-placement residual --bert-embedding-norm --bert-first-position 2"),
    "bert cp2": (2, BERT + BATCH + CP + "2"),
    "bert pp2": (2, BERT + BATCH + PP + "2"),
    "bert dp2": (2, BERT + BATCH),
    "modern cp2": (2, MODERN + BATCH + CP + "2 --cp-comm-type all_gather"),
    "classes pp2 lora": (2, BERT.replace("--task bert", "--task classify --bert-classes 3") + BATCH + PP + "2 --lora-rank 16"),
    "choices dp2": (2, BERT.replace("--task bert", "--task multichoice --bert-choices 2") + BATCH),
    "t5 tp2": (2, T5 + BATCH + TP + "2"),
    "t5 tp2 sp": (2, T5 + BATCH + TP + "2 " + SP),
    "t5 tp2 sp padded": (2, T5 + BATCH + TP + "2 " + SP + "--remove-padding false"),
    "t5 tp2 sp full": (2, T5 + BATCH + TP + "2 " + SP + FULL),
    "t5 dp2 zero1": (2, T5 + BATCH + ZERO1),
    "t5 pp4": (4, T5 + BATCH + PP + "4"),
    "t5 relative tp2": (2, T5 + RELATIVE + BATCH + TP + "2"),
    "t5 relative pp2": (2, T5 + RELATIVE + BATCH + PP + "2 --pipeline-model-parallel-layout Ee*24t*4|t*8L"),
    "t5 relative pp4": (4, T5 + RELATIVE + BATCH + PP + "4"),
    "t5 cp2": (2, T5 + BATCH + CP + "2 --cp-comm-type all_gather"),
    "t5 cp2 fp8": (2, T5 + BATCH + CP + "2 --cp-comm-type all_gather " + FP8),
    "t5 relative cp2": (2, T5 + RELATIVE + BATCH + CP + "2 --cp-comm-type all_gather"),
    "t5 relative cp2 a2a": (2, T5 + RELATIVE + "--query-pre-attn-scalar 1 " + BATCH + CP + "2 --cp-comm-type a2a"),
    "retro tp2 sp": (2, RETRO + BATCH + TP + "2 " + SP),
    "llava tp2": (2, LLAVA + BATCH + TP + "2"),
    "llava next tp2": (2, LLAVA + "--vision-newlines " + BATCH + TP + "2"),
    "llava tp2 sp divided": (2, LLAVA + BATCH + TP + "2 " + SP + "--encoder-tensor-model-parallel-size 2"),
    "llava tp2 again": (2, LLAVA + BATCH + TP + "2 --encoder-recompute-granularity full"),
    "llava tp2 to host": (2, LLAVA + BATCH + TP + "2 --encoder-offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm mlp_fc1 mlp_act mlp_fc2"),
    "llava dp2 ahead": (2, LLAVA + BATCH + "--freeze vision_model --mimo-encoder-prefetch"),
    "llava tp2 sp": (2, LLAVA + BATCH + TP + "2 " + SP),
    "gemma3 pp2": (2, GEMMA3 + BATCH + PP + "2"),
    "llava cp2": (2, LLAVA + BATCH + CP + "2"),
    "gemma3 cp2": (2, GEMMA3 + BATCH + CP + "2 --cp-comm-type all_gather"),
    "qwen2 vl cp2": (2, QWEN2_VL + BATCH + CP + "2"),
    "llava pp3 v": (3, LLAVA.replace("--untie-embeddings-and-output-weights ", "") + BATCH + "--num-layers 4 --vision-num-layers 2 "
                    "--freeze vision_model.conv1 " + PP + "3 --pipeline-model-parallel-layout V|VEt|t*3L"),
    "llava own tp2 sp": (3, LLAVA + BATCH + TP + "2 " + SP + "--encoder-data-parallel-size 1"),
    "llava dp2 zero3": (2, LLAVA + BATCH + ZERO3 + "--no-balance-images "),
    "llava dp2 zero3 factors": (2, LLAVA + BATCH + ZERO3 + "--lr-factors vision_model=0.1 vision_projection=2"),
    "llava dp2 dropout": (2, LLAVA + BATCH + "--hidden-dropout 0.1"),
    "retro tp2 sp again": (2, RETRO + BATCH + TP + "2 " + SP + "--recompute-granularity selective --recompute-modules retro_encoder"),
    "retro pp2": (2, RETRO + BATCH + PP + "2"),
    "t5 pp4 equal lengths": (4, T5 + BATCH + PP + "4 --decoder-seq-length 512"),
    "llama dp2 fp8": (2, LLAMA + BATCH + FP8),
    "llama tp2 fp8 blocks": (2, LLAMA + BATCH + TP + "2 --bf16 --fp8-format e4m3 --fp8-recipe blockwise"),
    "llama pp2 vpp2 fp8": (2, LLAMA + BATCH + PP + "2 " + VPP + "2 --num-layers 8 " + FP8),
}


@dataclass(frozen=True)
class Bug:
    name: str
    what: str  # for people: what goes wrong
    edits: tuple  # of (file, old text, new text)
    rows: str  # of tests/parallel/layouts.cc
    prove: str  # of PROOFS, separated by commas
    unit_test: str = ""  # in place of rows: "program:filter"
    unproved: str = ""  # in place of `prove`: why no proof can say no
    unmatched: str = ""  # in place of rows: why the matrix cannot have it


LAYERS = "megatron/tensor_parallel/layers.cc"
GROUPED_GEMM = "megatron/tensor/experts/grouped_gemm.cc"
GROUPED_MLP = "megatron/transformer/moe/grouped_mlp.cc"
ROUTED = "megatron/transformer/moe/routed_experts.cc"
ROUTER = "megatron/transformer/moe/router.cc"
BALANCES = "megatron/transformer/moe/balance.cc"
PERTURBATION = "megatron/transformer/moe/perturbation.cc"
MOE_LAYER = "megatron/transformer/moe/moe_layer.cc"
FLEX = "megatron/transformer/moe/token_dispatcher_flex.cc"
DISPATCH_PLAN = "megatron/transformer/moe/dispatch_plan.cc"
DISPATCHER = "megatron/transformer/moe/token_dispatcher.cc"
ROWS = "megatron/transformer/moe/token_dispatcher_rows.cc"
PEER_ROWS = "megatron/comm/peer_rows.cc"
ALLGATHER = "megatron/transformer/moe/token_dispatcher_allgather.cc"
LORA = "megatron/tensor_parallel/lora_adapter.cc"
QUANTIZED_LINEAR = "megatron/tensor_parallel/quantized_linear.cc"
OVERLAPPED = "megatron/tensor_parallel/overlapped_linear.cc"
MAILBOX = "megatron/comm/peer_mailbox.cc"
CROSS_ENTROPY = "megatron/tensor_parallel/cross_entropy.cc"
EMBEDDING = "megatron/tensor_parallel/vocab_parallel_embedding.cc"
ATTENTION_BLOCK = "megatron/tensor/attention/attention_block.cc"
QK_NORM = "megatron/transformer/attention/qk_norm.cc"
ATTENTION = "megatron/transformer/attention/attention.cc"
CORE_ATTENTION = "megatron/transformer/attention/core_attention.cc"
LATENT_ATTENTION = "megatron/transformer/attention/multi_latent_attention.cc"
LAYER = "megatron/transformer/transformer_layer.cc"
ROTARY_EMBEDDING = "megatron/transformer/attention/rotary_embedding.cc"
ACTIVATION_CPU = "megatron/kernels/activation_cpu.cc"
SUBLAYER = "megatron/transformer/layer/sublayer.cc"
BLOCK = "megatron/transformer/transformer_block.cc"
MLP = "megatron/transformer/feed_forward/mlp.cc"
CONTEXT = "megatron/transformer/context_parallel/context_parallel.cc"
RING = "megatron/transformer/context_parallel/context_parallel_ring.cc"
GATHER = "megatron/transformer/context_parallel/context_parallel_all_gather.cc"
A2A = "megatron/transformer/context_parallel/context_parallel_all_to_all.cc"
MODEL_ENDS = "megatron/models/common/embedding.cc"
DDP = "megatron/distributed/distributed_data_parallel.cc"
DOMAIN = "megatron/distributed/reduction_domain.cc"
GRADS = "megatron/distributed/grad_buffer.cc"
VALUES = "megatron/distributed/value_buffer.cc"
OPTIMIZER = "megatron/optimizer/optimizer.cc"
REDUCTION = "megatron/nn/reduction.cc"
PLACEMENT = "megatron/nn/placement.cc"
MODULE = "megatron/nn/module.cc"
SHARDED_LAYOUT = "megatron/distributed/sharded_layout.cc"
SCHEDULE = "megatron/pipeline_parallel/schedule.cc"
STAGES = "megatron/pipeline_parallel/stage_layout.cc"
PASSES = "megatron/training/passes.cc"
STEP = "megatron/training/train_step.cc"
SETUP = "megatron/training/setup.cc"
GROUPS = "megatron/comm/parallel_groups.cc"
GPT_MODEL = "megatron/models/gpt/gpt_model.cc"
VOCABULARY_PASS = "megatron/models/common/vocabulary_pass.cc"
SCALING = "megatron/distributed/delayed_scaling.cc"
EVALUATION = "megatron/training/evaluation.cc"
LOADER, SAMPLER = "megatron/datasets/data_loader.cc", "megatron/datasets/sampler.cc"
DPO = "megatron/training/tasks/dpo_loss.cc"
SHIFTED = "megatron/models/common/shifted_batch.cc"
MTP = "megatron/models/common/multi_token_prediction.cc"
GPT_MODEL = "megatron/models/gpt/gpt_model.cc"
BERT_MODEL = "megatron/models/bert/bert_model.cc"
BERT_TASK = "megatron/training/tasks/bert.cc"
COUNTED_ROWS = "megatron/models/common/counted_rows.cc"

BUGS = (
    # Tensor and sequence parallelism.
    Bug("norm_grad_not_reduced", "gradients of the norms in front of linears are not summed under sequence parallelism",
        ((LAYERS, "norm.partial_over_tensor = options.sequence_parallel;",
          "norm.partial_over_tensor = !PLANTED && options.sequence_parallel;"),),
        "tp4_sp tp3_sp_llama", "gpt tp2 sp"),
    Bug("final_norm_grad_not_reduced", "the gradient of the final norm is not summed under sequence parallelism",
        ((BLOCK, "norm_options(config, sequence_parallel)", "norm_options(config, !PLANTED && sequence_parallel)"),),
        "tp4_sp", "gpt tp2 sp"),
    Bug("qk_norm_grad_not_reduced", "gradients of query and key norms, which see the heads of one rank, are not summed",
        ((QK_NORM, "options.partial_over_tensor = tp.size() > 1;", "options.partial_over_tensor = !PLANTED && tp.size() > 1;"),),
        "tp4_groups2", "qwen tp4 sp"),
    Bug("row_bias_grad_not_reduced", "gradients of biases after a reduce-scatter are not summed under sequence parallelism",
        ((LAYERS, "if (options.sequence_parallel) impl_->bias.placement.partial_grad.insert(Axis::kTensor);",
          "if (!PLANTED && options.sequence_parallel) impl_->bias.placement.partial_grad.insert(Axis::kTensor);"),),
        "tp4_sp", "gpt tp2 sp"),
    Bug("row_bias_grad_per_rank", "gradients of biases that every rank has whole are counted once per rank",
        ((LAYERS, "  add(\"weight\", &impl_->weight);\n  if (options.bias) add(\"bias\", &impl_->bias);\n"
                  "  impl_->state = {&impl_->weight, options.bias ? &impl_->bias : nullptr,  nullptr,",
          "  if (PLANTED) impl_->bias.placement.partial_grad.insert(Axis::kTensor);\n"
          "  add(\"weight\", &impl_->weight);\n  if (options.bias) add(\"bias\", &impl_->bias);\n"
          "  impl_->state = {&impl_->weight, options.bias ? &impl_->bias : nullptr,  nullptr,"),),
        "tp2", "gpt tp2"),
    Bug("row_bias_added_per_rank", "every rank adds the bias before the sum over ranks",
        ((LAYERS, "product(*state, x, weight.value(), at::Tensor())",
          "product(*state, x, weight.value(), PLANTED ? bias.value() : at::Tensor())"),),
        "tp2", "gpt tp2"),
    Bug("adapter_grad_not_reduced", "gradients of the halves of adapters that every rank has whole are not summed",
        ((LORA, "(column ? a : b).placement.partial_grad.insert(Axis::kTensor);",
          "if (!PLANTED) (column ? a : b).placement.partial_grad.insert(Axis::kTensor);"),),
        "tp2_lora", "llama tp2 lora"),
    Bug("column_input_grad_not_reduced", "the input gradient of a column-parallel linear is not summed over tensor ranks",
        ((LAYERS, "reduction = sum_over_ranks(state, dx);", "reduction = PLANTED ? nullptr : sum_over_ranks(state, dx);"),),
        "tp2", "llama tp2"),
    Bug("rows_of_the_wrong_rank", "a linear multiplies the rows that arrive as if they were another rank's",
        ((OVERLAPPED, "return exchange_->parts(first_rank, count);",
          "return exchange_->parts(PLANTED && count < tp_.size() ? tp_.size() - first_rank - count : first_rank, count);"),),
        "tp4_sp", "gpt tp2 sp"),
    Bug("mailbox_slot_not_free", "a part is written into a slot of the mailbox that its receiver still reads",
        ((MAILBOX, "if (to != own && number_ >= PeerMailbox::kSlots)", "if (!PLANTED && to != own && number_ >= PeerMailbox::kSlots)"),
         (MAILBOX, "slot_(static_cast<int>(number_ % PeerMailbox::kSlots))", "slot_(PLANTED ? 0 : static_cast<int>(number_ % PeerMailbox::kSlots))")),
        "tp4_sp", "gpt tp2 sp"),
    Bug("reduction_not_waited_for", "nobody waits for the sum of the input gradient that runs under the weight gradient",
        ((LAYERS, "if (reduction && !postponed) reduction->wait();", "if (reduction && !postponed && !PLANTED) reduction->wait();"),),
        "tp2", "llama tp2"),
    Bug("postponed_gradient_twice", "a weight gradient that waits for the next exchange counts twice",
        ((MAILBOX, "for (const std::function<void()>& work : std::exchange(postponed_, {})) work();",
          "for (const std::function<void()>& work : std::exchange(postponed_, {})) {\n    work();\n    if (PLANTED) work();\n  }"),),
        "tp4_sp", "gpt tp2 sp"),
    Bug("postponed_gradient_keeps_its_slot", "a weight gradient that waits for the next exchange still holds the slot that this one needs",
        ((MAILBOX, "if (opened_ >= closed_ + kSlots) run_postponed();", "if (!PLANTED && opened_ >= closed_ + kSlots) run_postponed();"),),
        "tp2_sp_t5", "t5 tp2 sp"),
    Bug("tied_head_reduced_twice", "under sequence parallelism the input gradient of the head is summed twice",
        ((LAYERS, "if (residual_path_grad.defined()) dx = dx + residual_path_grad;",
          "if (PLANTED && state.sequence_parallel) state.tp->all_reduce(dx)->wait();\n      if (residual_path_grad.defined()) dx = dx + residual_path_grad;"),),
        "tp4_sp", "gpt tp2 sp"),
    Bug("input_of_the_pass_before", "a weight gradient takes the rows that were sent for in another micro-batch",
        ((LAYERS, "std::exchange(state.input_rows, nullptr)", "PLANTED ? state.input_rows : std::exchange(state.input_rows, nullptr)"),
         (LAYERS, "if (gathers_input(state))\n", "if (gathers_input(state) && !(PLANTED && state.input_rows))\n")),
        "tp4_sp", "gpt tp2 sp"),
    Bug("gate_split_as_one", "gate and up projections are split over ranks as if they were one matrix",
        ((MLP, "    options.parts = {config.ffn_hidden_size, config.ffn_hidden_size};",
          "    options.parts = PLANTED ? std::vector<int64_t>{} : std::vector<int64_t>{config.ffn_hidden_size, config.ffn_hidden_size};"),),
        "tp2_llama", "llama tp2"),
    Bug("kv_grad_not_summed", "with fewer groups than tensor ranks, gradients of shared keys and values are not summed",
        ((ATTENTION, "all_gather_last_dim_from_tensor_parallel_region(result.output, kv_)",
          "(PLANTED ? gather_from_tensor_model_parallel_region : all_gather_last_dim_from_tensor_parallel_region)(result.output, kv_)"),),
        "tp4_groups2", "qwen tp4 sp"),
    Bug("query_heads_of_first_rank", "of the ranks that share keys and values each attends with the query heads of the first",
        ((ATTENTION, "heads.narrow(2, kv_.rank() * heads_, heads_)", "heads.narrow(2, (PLANTED ? 0 : kv_.rank()) * heads_, heads_)"),),
        "tp4_groups2", "qwen tp4 sp"),
    Bug("cross_entropy_max_not_reduced", "each tensor rank subtracts its own maximum of the logits",
        ((CROSS_ENTROPY, "tp.all_reduce(t, ReduceOp::kMax)->wait();", "if (!PLANTED) tp.all_reduce(t, ReduceOp::kMax)->wait();"),),
        "tp2", "gpt tp2"),
    Bug("padding_in_softmax", "rows that pad the vocabulary for the tensor ranks take part in the softmax",
        ((CROSS_ENTROPY, "std::clamp<int64_t>(vocab_size - first, 0, columns)", "PLANTED ? columns : std::clamp<int64_t>(vocab_size - first, 0, columns)"),),
        "tp2", "gpt tp2"),
    Bug("vocabulary_range_off_by_one", "a tensor rank does not find the first row of its share of the embedding",
        ((EMBEDDING, "at::where((local >= 0)", "at::where((local >= (PLANTED && tp_.rank() > 0 ? 1 : 0))"),),
        "tp2", "gpt tp2"),
    Bug("position_grad_not_reduced", "gradients of learned positions are not summed under sequence parallelism",
        ((MODEL_ENDS, "position_embeddings_->set_sequence_parallel(config.sequence_parallel);",
          "position_embeddings_->set_sequence_parallel(!PLANTED && config.sequence_parallel);"),),
        "tp4_sp", "gpt tp2 sp"),
    Bug("position_rows_of_first_rank", "under sequence parallelism positions that documents restart are those of the first tensor rank",
        ((MODEL_ENDS, "out.first_row = tp.rank() * own;", "out.first_row = (PLANTED ? 0 : tp.rank()) * own;"),),
        "tp2_sp_positions", "gpt tp2 sp documents"),
    # Dropout.
    Bug("hidden_dropout_equal_over_sequence", "under sequence parallelism all tensor ranks drop the same places of different tokens",
        ((SUBLAYER, "const TokenPositions& place = pass.rows.position.defined() ? pass.rows : pass.place;",
          "TokenPositions place = pass.rows.position.defined() ? pass.rows : pass.place;\n"
          "  if (PLANTED) place.position = pass.place.position.narrow(0, 0, place.position.size(0));"),),
        "tp4_groups2_sp tp4_sp", "qwen tp4 sp"),
    Bug("hidden_dropout_differs_over_tensor", "tensor ranks drop different places of the same activations",
        ((LAYER, "random_key(config.seed, \"mlp_output_dropout\", layer_number)",
          "random_key(config.seed + (PLANTED ? groups.tp.rank() : 0), \"mlp_output_dropout\", layer_number)"),),
        "tp2", "gpt tp2"),
    Bug("attention_dropout_equal_over_heads", "tensor ranks drop the same probabilities of different heads",
        ((CORE_ATTENTION, "first_head_(groups.tp.rank() * heads)", "first_head_(PLANTED ? 0 : groups.tp.rank() * heads)"),),
        "tp2", "gpt tp2"),
    Bug("attention_dropout_equal_after_a2a", "context ranks that traded tokens for heads drop the same probabilities",
        ((A2A, "own.first_head += first;", "if (!PLANTED) own.first_head += first;"),),
        "cp2_a2a_dropout", "gpt cp2 a2a"),
    Bug("sinks_of_the_first_heads_after_a2a", "context ranks that traded tokens for heads take the sinks of the first heads",
        ((A2A, "options.sinks.narrow(0, first, heads);", "options.sinks.narrow(0, PLANTED ? 0 : first, heads);"),),
        "cp3_a2a_sinks", "llama cp2 a2a sinks"),
    Bug("sinks_of_every_block", "ring attention sums the sink of a head once for every block of keys",
        ((RING, "if (pass_.options.sinks.defined()) add_attention_sinks(total, pass_.options.sinks);",
          "for (int64_t i = 0; pass_.options.sinks.defined() && i < (PLANTED ? c_ : 1); ++i)\n"
          "      add_attention_sinks(total, pass_.options.sinks);"),),
        "cp2_sinks", "llama cp2 sinks"),
    Bug("sinks_of_early_queries", "over gathered keys only the early chunk of a rank's queries has sinks",
        ((GATHER, "if (pass.options.sinks.defined()) add_attention_sinks(block, pass.options.sinks);",
          "if (pass.options.sinks.defined() && !(PLANTED && !out.empty()))\n"
          "        add_attention_sinks(block, pass.options.sinks);"),),
        "cp2_gather_window_sinks", "llama cp2 gather sinks"),
    Bug("ring_dropout_places", "the ring drops probabilities by the places of its own keys instead of those that arrived",
        ((RING, "positions_[static_cast<size_t>(peer(step))].narrow(0, 0, m.num_keys)",
          "positions_[static_cast<size_t>(PLANTED ? rank_ : peer(step))].narrow(0, 0, m.num_keys)"),),
        "cp2", "gpt cp2"),
    # Context parallelism.
    Bug("rotary_not_offset", "rotary positions count from 0 on every context rank",
        ((BLOCK, "pass.position_ids.defined() ? pass.position_ids : pass.place.position",
          "pass.position_ids.defined() ? pass.position_ids\n"
          "        : PLANTED ? at::arange(pass.place.position.size(0), pass.place.position.options()) : pass.place.position"),),
        "cp3_llama", "llama cp2"),
    Bug("zigzag_order", "the late half of the zig-zag is dealt out in rising order",
        ((CONTEXT, "x.narrow(dim, (2 * c - 1 - rank) * chunk, chunk)", "x.narrow(dim, (PLANTED ? c + rank : 2 * c - 1 - rank) * chunk, chunk)"),),
        "cp2", "llama cp2"),
    Bug("documents_ignored", "attention crosses the borders of documents, but under context parallelism only",
        ((CONTEXT, "block.mask = document_mask(document_ids, query_position, key_position);",
          "if (!PLANTED) block.mask = document_mask(document_ids, query_position, key_position);"),),
        "cp2_documents cp2_gather", "qwen cp2"),
    Bug("ring_without_rescale", "parts of ring attention are added without rescaling by the log-sum-exp",
        ((ATTENTION_BLOCK, "total.out.mul_(weight(total.lse))", "(PLANTED ? total.out : total.out.mul_(weight(total.lse)))"),),
        "cp2", "llama cp2"),
    Bug("ring_sees_the_future", "queries attend to the late chunk of an earlier rank",
        ((RING, "if (peer < rank) return {0, local, local / 2, false};", "if (peer < rank) return {0, local, PLANTED ? local : local / 2, false};"),),
        "cp2", "llama cp2"),
    Bug("a2a_kv_tiled", "with fewer groups than context ranks, keys and values are repeated as a whole instead of one by one",
        ((A2A, "if (r == 1) return x;", "if (r == 1) return x;\n  if (PLANTED) return x.repeat({1, 1, r, 1});"),),
        "cp4_a2a_groups2", "llama tp2 cp8 a2a, qwen cp4 a2a"),
    Bug("a2a_kv_in_turn", "an all-to-all deals out keys and values in turn, but queries in blocks",
        ((A2A, "by_rank.push_back(x.reshape({l, b, a, -1}).permute({2, 0, 1, 3}));",
          "by_rank.push_back(PLANTED && !by_rank.empty() ? x.reshape({l, b, x.size(2) / a, a, x.size(3)}).permute({3, 0, 1, 2, 4}).reshape({a, l, b, -1})\n"
          "        : x.reshape({l, b, a, -1}).permute({2, 0, 1, 3}));"),),
        "cp3_a2a", "llama cp2 a2a"),
    Bug("hierarchy_swapped", "heads are traded in the outer groups and rings run in the inner ones",
        ((CONTEXT, "inner = level(groups, 0);", "inner = level(groups, PLANTED ? 1 : 0);"),
         (CONTEXT, "outer = level(groups, 1);", "outer = level(groups, PLANTED ? 0 : 1);")),
        "cp4_hierarchy", "gpt cp4 hierarchy"),
    Bug("window_off_by_one", "a sliding window over gathered keys loses its leftmost key",
        ((GATHER, "std::max<int64_t>(0, index * chunk - o.window_left)", "std::max<int64_t>(0, index * chunk - o.window_left + (PLANTED ? 1 : 0))"),),
        "cp2_gather_window", "llama cp2 window"),
    Bug("gather_grad_overwritten", "the second half of the queries overwrites gradients of keys instead of adding to them",
        ((GATHER, "keys(dk).add_(dk_half);", "PLANTED ? keys(dk).copy_(dk_half) : keys(dk).add_(dk_half);"),),
        "cp2_gather", "gpt cp2 gather"),
    Bug("loss_over_wrong_group", "losses and token counts are summed over data ranks, not over context ranks too",
        ((PASSES, "model.groups().dp_cp.all_reduce(totals)->wait();",
          "(PLANTED ? model.groups().dp : model.groups().dp_cp).all_reduce(totals)->wait();"),),
        "cp2", "llama cp2"),
    Bug("grads_over_data_only", "gradients are summed over data ranks, not over context ranks too",
        ((GROUPS, "groups.dp_cp = make({Axis::kData, Axis::kContext}, \"dp_cp\");",
          "groups.dp_cp = make(PLANTED ? AxisSet{Axis::kData} : AxisSet{Axis::kData, Axis::kContext}, \"dp_cp\");"),),
        "cp2", "llama cp2"),
    Bug("mean_over_own_tokens", "the mean of a micro-batch divides by the tokens of this context rank",
        ((PASSES, "model_.groups().cp.all_reduce(weight)->wait();", "if (!PLANTED) model_.groups().cp.all_reduce(weight)->wait();"),),
        "cp2_means", "qwen cp2 means"),
    Bug("context_ranks_read_apart", "the context ranks of one sequence read different samples",
        ((SETUP, "options.sampler.data_parallel_rank = everything ? 0 : data_parallel_rank(arguments, groups);",
          "options.sampler.data_parallel_rank = everything ? 0 : PLANTED ? groups.dp_cp.rank() % groups.dp.size() : data_parallel_rank(arguments, groups);"),),
        "cp2_dp2_zero1", "qwen cp2 dp2"),
    # Data parallelism.
    Bug("mask_normalised_per_rank", "each data rank divides by its own number of unmasked tokens",
        ((PASSES, "  model.groups().pp.all_reduce(totals)->wait();",
          "  if (PLANTED) totals.narrow(0, 1, 1).copy_(passes->totals_before() * model.groups().dp_cp.size());\n"
          "  model.groups().pp.all_reduce(totals)->wait();"),
         (PASSES, "  const at::Tensor totals = passes->totals();", "  const at::Tensor totals = passes->totals();\n  passes->keep_totals();"),
         (PASSES, "  at::Tensor totals() const { return totals_; }",
          "  at::Tensor totals() const { return totals_; }\n  at::Tensor before_;\n"
          "  void keep_totals() { before_ = totals_.narrow(0, 1, 1).clone(); }\n  at::Tensor totals_before() const { return before_; }")),
        "dp2_documents", "qwen dp2"),
    Bug("totals_over_tensor_ranks", "losses and token counts are summed over tensor ranks too",
        ((PASSES, "  const at::Tensor totals = passes->totals();",
          "  const at::Tensor totals = passes->totals();\n  if (PLANTED) model.groups().tp.all_reduce(totals)->wait();"),),
        "tp2", "gpt tp2"),
    Bug("means_not_divided_by_ranks", "a mean of means divides by micro-batches, but not by data ranks",
        ((STEP, "static_cast<double>(options.num_microbatches * options.replicas)",
          "static_cast<double>(options.num_microbatches * (PLANTED ? 1 : options.replicas))"),),
        "dp2_means", "gpt dp2 means"),
    Bug("data_ranks_read_the_same", "every data rank reads the samples of the first",
        ((SETUP, "options.sampler.data_parallel_size = everything ? 1 : arguments.data_parallel_size();",
          "if (PLANTED) options.sampler.data_parallel_rank = 0;\n  options.sampler.data_parallel_size = everything ? 1 : arguments.data_parallel_size();"),),
        "dp2", "gpt dp2 means"),
    Bug("last_microbatch_wins", "sharded gradients of a micro-batch replace those before instead of adding to them",
        ((GRADS, "summed_[bucket] = true;", "summed_[bucket] = !PLANTED;"),),
        "dp2_zero2", "llama dp2 zero2"),
    Bug("table_forgets_passes", "of a sharded embedding, the gradient of the last micro-batch alone is summed",
        ((GRADS, "if (!last && layout_.buffer.buckets[bucket].table) return;",
          "if (!last && layout_.buffer.buckets[bucket].table) {\n      if (PLANTED)\n        for (const int parameter : layout_.buffer.buckets[bucket].parameters) written_[parameter] = false;\n      return;\n    }"),),
        "dp2_zero3", "llama dp2 zero3"),
    Bug("instances_not_summed", "instances of the sharded optimizer do not sum their gradients",
        ((GRADS, "if (pending.between_instances || layout_.groups.replica.size() == 1) return;",
          "if (pending.between_instances || layout_.groups.replica.size() == 1 || (PLANTED && layout_.groups.shard.size() > 1)) return;"),),
        "dp4_zero1_instances2", "gpt dp4 zero1 instances"),
    Bug("sharded_instances_not_summed", "instances of fully sharded parameters do not sum their gradients",
        ((GRADS, "    if (!reduction_.in_bf16) return layout_.groups.replica.all_reduce(shard_)->wait();",
          "    if (PLANTED) return;\n    if (!reduction_.in_bf16) return layout_.groups.replica.all_reduce(shard_)->wait();"),),
        "dp4_zero3_instances2", "llama dp4 zero3 instances"),
    Bug("shard_boundary_off_by_one", "shards of a bucket begin one element too late",
        ((DOMAIN, "const int64_t first = layout.bucket_begin(bucket) + layout.shard_begin(bucket);",
          "const int64_t first = layout.bucket_begin(bucket) + layout.shard_begin(bucket) + (PLANTED && layout.shard_begin(bucket) > 0 ? 1 : 0);"),),
        "dp4_zero1", "gpt pp2 dp2 zero1"),
    Bug("shards_merged", "slices of several buckets are taken for one piece",
        ((DOMAIN, "buckets[bucket].wide == wide && value_begin == value_end && (frozen || grad_begin == grad_end);",
          "buckets[bucket].wide == wide && (PLANTED || (value_begin == value_end && (frozen || grad_begin == grad_end)));"),),
        "dp4_zero1_overlap", "llama dp4 zero1, llama dp2 zero2"),
    Bug("sharded_buckets_overlap", "sharded gradients of a bucket are kept where those of the one before it are, from the third on",
        ((GRADS, "return layout_.packed_begin(bucket);", "return layout_.packed_begin(PLANTED && bucket > 1 ? bucket - 1 : bucket);"),),
        "dp2_zero2_buckets", "llama dp2 zero2"),
    Bug("middle_bucket_not_gathered", "updated weights of the first and the last bucket are gathered, but of none between them",
        ((VALUES, "gathers_[bucket] = gather_.gather(",
          "if (PLANTED && bucket > 0 && bucket + 1 < end) continue;\n      gathers_[bucket] = gather_.gather("),),
        "dp4_zero1_overlap", "llama dp4 zero1"),
    Bug("bucket_not_gathered", "updated weights of one bucket are never gathered",
        ((VALUES, "bucket-- > 0;) {  // the forward needs the last bucket first", "bucket-- > (PLANTED ? 1 : 0);) {  // the forward needs the last bucket first"),),
        "dp4_zero1", "gpt pp2 dp2 zero1"),
    Bug("gather_not_waited_for", "the forward goes on before a bucket of updated weights is there",
        ((VALUES, "if (gathering_) wait(layout_.buffer.slots[parameter].bucket);", "if (gathering_ && !PLANTED) wait(layout_.buffer.slots[parameter].bucket);"),),
        "dp4_zero1_overlap", "gpt pp2 dp2 zero1"),
    Bug("bucket_not_waited_for", "the optimizer goes on before the gradients of a bucket are summed",
        ((GRADS, "      pending.work->wait();\n      if (reduction_.in_bf16)", "      if (!PLANTED) pending.work->wait();\n      if (reduction_.in_bf16)"),),
        "dp2", "gpt dp2 means"),
    Bug("stale_weights", "fully sharded layers go on with the weights that were gathered before the step",
        ((VALUES, "  void changed(bool) override {\n    free_unused();", "  void changed(bool) override {\n    if (PLANTED) return gather_.written();\n    free_unused();"),
         (DDP, "domain->values->free_unused();", "if (!PLANTED) domain->values->free_unused();"),
         (VALUES, "    if (entered) free_unused_but(", "    if (entered && !PLANTED) free_unused_but(")),
        "dp2_zero3 dp4_zero3_overlap", "llama dp2 zero3"),
    # Tied embeddings over stages.
    Bug("tied_grad_not_summed", "gradients of an embedding that is tied over stages are not summed",
        ((DDP, "sum_shared(std::move(shared));", "if (PLANTED) shared.clear();\n  sum_shared(std::move(shared));"),),
        "pp2", "gpt pp2"),
    Bug("tied_grad_summed_twice", "gradients of an embedding that is tied over stages are summed twice",
        ((DDP, "sum_shared(std::move(shared));", "if (PLANTED) sum_shared(shared);\n  sum_shared(std::move(shared));"),),
        "pp2", "gpt pp2"),
    Bug("tied_grad_summed_too_early", "gradients of a tied embedding are summed over stages before the reduce-scatter over data ranks",
        ((DDP, "for (const auto& domain : chunk->domains_) domain->finish_grad_sync();",
          "if (PLANTED) sum_shared(chunk->shared_grads_);\n    for (const auto& domain : chunk->domains_) domain->finish_grad_sync();"),
         (DDP, "sum_shared(std::move(shared));", "if (PLANTED) shared.clear();\n  sum_shared(std::move(shared));")),
        "pp2_dp2_zero1_late", "gpt pp2 dp2 zero1 late"),
    Bug("tied_copy_starts_apart", "the last stage's copy of a tied embedding starts from other weights",
        ((MODEL_ENDS, "config.transformer.embedding_init(config.vocab_size), config.sequence_parallel, groups) {\n    table_",
          "PLANTED ? Init::normal(0.1) : config.transformer.embedding_init(config.vocab_size), config.sequence_parallel, groups) {\n    table_"),),
        "pp2", "gpt pp2"),
    # The optimizer.
    Bug("norm_counts_shared_twice", "the gradient norm counts a tied embedding on both of its stages",
        ((REDUCTION, "return copy_index(parameter, groups)",
          "return (PLANTED ? replica_index({&groups.group(copy_axes(parameter.placement))}) : copy_index(parameter, groups))"),),
        "pp2", "gpt pp2"),
    Bug("norm_counts_copies", "the gradient norm counts parameters that tensor ranks have whole on each of them",
        ((REDUCTION, ".index == 0;", ".index == 0 || PLANTED;"),),
        "tp2", "gpt tp2"),
    Bug("norm_of_own_shard", "the clip factor follows from this rank's shard alone",
        ((OPTIMIZER, "models.front()->data_groups()[k].shard.all_reduce(value)->wait();",
          "if (!PLANTED) models.front()->data_groups()[k].shard.all_reduce(value)->wait();"),),
        "dp4_zero1", "gpt pp2 dp2 zero1"),
    Bug("norm_of_own_stage", "the clip factor follows from this stage alone",
        ((OPTIMIZER, "norm_group(placements[k], groups()).all_reduce(value)->wait();",
          "(PLANTED ? groups().tp : norm_group(placements[k], groups())).all_reduce(value)->wait();"),),
        "pp2", "gpt pp2"),
    Bug("decay_on_sharded_norm", "weight decay reaches norms, but under sequence parallelism only",
        ((OPTIMIZER, "const bool exempt = parameter.global_shape.size() <= 1 ||",
          "const bool exempt = (parameter.global_shape.size() <= 1 && !(PLANTED && parameter.placement.partial_grad.contains(Axis::kTensor))) ||"),),
        "tp3_sp_llama", "gpt tp2 sp"),
    Bug("step_counts_differ", "data ranks count Adam's steps differently",
        ((OPTIMIZER, "  step_control(state, schedule, rules, sum, weight, samples);",
          "  step_control(state, schedule, rules, sum, weight, samples);\n"
          "  if (PLANTED && groups().dp.rank() > 0) step_control(state, schedule, rules, sum, weight, samples);"),),
        "dp2", "gpt pp2 dp2 zero1"),
    # Pipelines.
    Bug("warm_up_off_by_one", "a stage leaves out as many backward passes at the end as its warm-up is miscounted",
        ((SCHEDULE, "  for (int k = 0; k < total + warm_up; ++k) {", "  for (int k = 0; k < total + warm_up - (PLANTED && warm_up > 0 ? 1 : 0); ++k) {"),),
        "pp2", "gpt pp2"),
    Bug("last_weight_grad_dropped", "a zero-bubble stage leaves out the weight gradient of its last micro-batch",
        ((SCHEDULE, "  for (int k = 0; k < total + warm_up + lag; ++k) {",
          "  for (int k = 0; k < total + warm_up + lag - (PLANTED && lag > 0 ? 1 : 0); ++k) {"),),
        "pp4_zbh1", "gpt pp2 zb-h1"),
    Bug("layer_dropped", "the last stage builds one layer less than its share",
        ((STAGES, "StageSlice StageLayout::slice(int stage, int chunk) const {",
          "StageSlice StageLayout::slice(int stage, int chunk) const {\n"
          "  if (PLANTED && num_stages_ > 1 && stage == num_stages_ - 1) {\n"
          "    StageSlice less = segments_.at(static_cast<size_t>(segment_of(placement_, num_stages_, {stage, chunk})));\n"
          "    --less.num_layers;\n    return less;\n  }"),),
        "pp2", "gpt pp2"),
    Bug("layer_number_local", "layer numbers count from the first layer of the stage",
        ((BLOCK, "make(config, numbered_after + i + 1, sequence_parallel, groups)",
          "make(config, numbered_after + (PLANTED ? i - first_layer + 1 : i + 1), sequence_parallel, groups)"),),
        "pp2_window3", "gemma pp2"),
    Bug("layer_number_without_chunk", "layer numbers count from the stage's share of the layers, as if it had no virtual stages",
        ((BLOCK, "for (int64_t i = first_layer; i < first_layer + num_layers; ++i) {",
          "const int64_t offset = PLANTED ? groups.pp.rank() * (config.num_layers / groups.pp.size()) - first_layer : 0;\n"
          "  for (int64_t i = first_layer; i < first_layer + num_layers; ++i) {"),
         (BLOCK, "layers_.push_back(make(config,", "layers_.push_back(make(config, offset + ")),
        "pp2_vpp2_window3", "gemma pp2 vpp2"),
    Bug("chunks_swapped", "virtual stages hold the layers of the next chunk",
        ((STAGES, "  if (num_stages_ == 1) return slice;",
          "  if (num_stages_ == 1) return slice;\n"
          "  const StageSlice& next = segments_.at(static_cast<size_t>(segment_of(placement_, num_stages_, {stage, (chunk + 1) % num_chunks()})));\n"
          "  if (PLANTED) slice.first_layer = next.first_layer, slice.num_layers = next.num_layers;"),),
        "pp2_vpp2", "llama pp2 vpp2"),
    Bug("stage_skips_collective", "stages after the first skip a collective that the others are in",
        ((PASSES, "model.groups().pp.all_reduce(totals)->wait();  //", "if (!PLANTED || model.groups().pp.rank() == 0) model.groups().pp.all_reduce(totals)->wait();  //"),),
        "pp2", "gpt pp2"),
    # Updates in the run's own types.
    Bug("bf16_reduce_offset", "gradients that are summed in bf16 are stored at the begin of their bucket, not in the shard",
        ((GRADS, "grads_.narrow(0, own_begin(pending.bucket), pending.own.numel()).copy_(pending.own);",
          "grads_.narrow(0, PLANTED ? layout_.bucket_begin(pending.bucket) : own_begin(pending.bucket), pending.own.numel()).copy_(pending.own);"),),
        "", "gpt dp2 zero1 bf16 sums", unit_test="exact_update_test:Layouts/ExactUpdate.IsThatOfOneRank/dp4_zero1_overlap_SumsInBf16"),
    Bug("overflow_local", "an infinite gradient is known to the ranks that hold it alone",
        ((OPTIMIZER, "void Optimizer::Impl::add_sums() { sum.copy_(sum_over_ranks(sums_by_domain())); }",
          "void Optimizer::Impl::add_sums() {\n  const at::Tensor all = sums_by_domain(), own = all.clone();\n"
          "  if (PLANTED) all.nan_to_num_(0.0, 0.0, 0.0);\n  sum.copy_(sum_over_ranks(all));\n"
          "  if (PLANTED && !own.isfinite().all().item<bool>()) sum.copy_(own.sum(0, true));\n}"),),
        "", "llama tp2 fp16", unit_test="exact_update_test:Layouts/ExactUpdate.IsThatOfOneRank/dp4_zero1_overlap_Fp16"),
    Bug("grad_reduce_bf16_always", "models in bf16 sum their gradients in bf16 without being asked to",
        ((DOMAIN, "const GradReduction reduction{overlap_grads, config.grad_reduce_in_bf16, config.peer_copies};",
          "const GradReduction reduction{overlap_grads, config.grad_reduce_in_bf16 || (PLANTED && dtype == at::kBFloat16), config.peer_copies};"),),
        "", "gpt dp2 bf16", unit_test="exact_update_test:Layouts/ExactUpdate.IsThatOfOneRank/dp2_more_Bf16"),
    Bug("hysteresis_by_stage", "later stages wait for one more overflow before they lower the loss scale",
        ((OPTIMIZER, "add_sums();\n  step_control(state, schedule, rules, sum, weight, samples);",
          "add_sums();\n  StepRules here = rules;\n  if (PLANTED && groups().pp.rank() > 0) ++here.hysteresis;\n"
          "  step_control(state, schedule, here, sum, weight, samples);"),),
        "", "gpt pp2 fp16", unit_test="exact_update_test:Layouts/ExactUpdate.IsThatOfOneRank/pp2_vocab_Fp16"),
    Bug("rounding_by_local_place", "chance roundings of narrow states are drawn by the place in the rank's part of a weight",
        ((OPTIMIZER, "runs = placed_runs(parameter, groups);", "if (!PLANTED) runs = placed_runs(parameter, groups);"),),
        "", "llama tp2 dp2 zero1 narrow", unit_test="exact_update_test:Layouts/ExactUpdate.IsThatOfOneRank/tp2_pp2_dp2_SumsInBf16"),
    Bug("narrow_in_first_piece", "the states of a rank's first bucket alone are narrow",
        ((OPTIMIZER, "update.states.push_back(at::zeros({end - begin}, update.grad.options().dtype(type)));",
          "update.states.push_back(at::zeros({end - begin}, update.grad.options().dtype(\n"
          "        PLANTED && !parts.empty() && type == at::kBFloat16 ? at::kFloat : type)));"),),
        "", "llama tp2 dp2 zero1 narrow", unit_test="exact_update_test:Layouts/ExactUpdate.IsThatOfOneRank/dp4_zero1_overlap_SumsInBf16"),
    Bug("half_bucket_not_gathered", "models in half precision go on with the old values of their first bucket",
        ((VALUES, "whole(bucket), {layout_.value_begin(bucket),",
          "PLANTED && bucket == 0 && !frozen_too && values_.element_size() == 2 ? whole(bucket).clone() : whole(bucket),"
          " {layout_.value_begin(bucket),"),),
        "", "llama dp2 zero1 bf16", unit_test="exact_update_test:Layouts/ExactUpdate.IsThatOfOneRank/dp4_zero1_overlap_Bf16"),
    Bug("instances_lost_in_bf16", "sums in bf16 between instances are dropped where gradients are sharded",
        ((GRADS, "shard_.copy_(rounded);", "if (!PLANTED) shard_.copy_(rounded);"),),
        "", "llama dp4 zero2 instances bf16 sums", unit_test="exact_update_test:Layouts/ExactUpdate.IsThatOfOneRank/dp4_zero1_instances2_more_SumsInBf16"),
    Bug("partial_sums_in_bf16", "models in bf16 round gradients to bf16 before they sum them over tensor ranks",
        ((DDP, "for (const auto& [group, parts] : partial_sums_) sum_together(parts, *group);",
          "for (const auto& [group, parts] : partial_sums_) {\n    for (const at::Tensor& part : parts)\n"
          "      if (PLANTED && dtype_ == at::kBFloat16) part.copy_(part.to(at::kBFloat16));\n    sum_together(parts, *group);\n  }"),),
        "", "gpt tp2 sp bf16", unit_test="exact_update_test:Layouts/ExactUpdate.IsThatOfOneRank/tp2_pp2_dp2_Bf16"),
    # Tokens that do not count.
    Bug("masked_part_counts", "a context rank's part of a micro-batch weighs at least one token, though all of its tokens are masked",
        ((GPT_MODEL, "return {(per_token * mask).sum(), mask.sum()};", "return {(per_token * mask).sum(), PLANTED ? mask.sum().clamp_min(1) : mask.sum()};"),),
        "cp2_documents cp2", "llama cp2 sft, llama cp4 sft, llama tp2 cp2 dp2 sft, qwen cp2, qwen hybrid cp"),
    Bug("masked_part_counts_in_vocabulary", "the same where the vocabulary is divided over the stages",
        ((VOCABULARY_PASS, "return {(per_token * mask_).sum(), mask_.sum()};", "return {(per_token * mask_).sum(), PLANTED ? mask_.sum().clamp_min(1) : mask_.sum()};"),),
        "pp2_cp2_vocab", "llama pp2 cp2 vocabulary"),
    Bug("mean_of_clamped_parts", "the weight of a micro-batch is the sum over context ranks of at least one token each",
        ((PASSES, "loss.weight.detach().to(loss.sum.scalar_type()).reshape({1}).clone();",
          "(PLANTED ? loss.weight.clamp_min(1) : loss.weight).detach().to(loss.sum.scalar_type()).reshape({1}).clone();"),),
        "cp2_means", "qwen cp2 means"),
    Bug("pair_of_own_part", "a pair of responses counts where this context rank's part has tokens that count",
        ((DPO, "(every_second(lengths, 0) + every_second(lengths, 1)).gt(0)",
          "(PLANTED ? every_second(loss_mask.sum(1), 0) + every_second(loss_mask.sum(1), 1) : every_second(lengths, 0) + every_second(lengths, 1)).gt(0)"),),
        "cp2_dpo", "llama cp2 dpo"),
    # Borders of documents.
    Bug("border_documents_joined", "no mask is made between two blocks that hold one document each, be they different ones",
        ((CONTEXT, "  return document_ids.index_select(1, query_position)\n      .unsqueeze(2)",
          "  if (PLANTED) {\n"
          "    const at::Tensor q = document_ids.index_select(1, query_position), k = document_ids.index_select(1, key_position);\n"
          "    const at::Tensor one = q.eq(q.narrow(1, 0, 1)).all(1).logical_and(k.eq(k.narrow(1, 0, 1)).all(1)).view({-1, 1, 1});\n"
          "    return q.unsqueeze(2).ne(k.unsqueeze(1)).logical_and(one.logical_not()).unsqueeze(1);\n  }\n"
          "  return document_ids.index_select(1, query_position)\n      .unsqueeze(2)"),),
        "cp2_documents cp2_gather", "qwen cp2"),
    # The schedule.
    Bug("lr_per_rank", "the samples of a step that move the schedule are those of one data rank",
        ((STEP, "model.optimizer->step(totals[1], options.global_batch_size);",
          "model.optimizer->step(totals[1], options.global_batch_size / (PLANTED ? model.groups().dp.size() : 1));"),),
        "dp2", "llama dp2 cosine, llama dp2 wsd"),
    Bug("decoupled_lr_of_tied_table", "a table that is tied over stages does not follow its decoupled learning rate",
        ((OPTIMIZER, "  return decoupled ? 1 : 0;", "  return decoupled && !(PLANTED && parameter.shared != nullptr && parameter.shared->size() > 1) ? 1 : 0;"),),
        "pp2_decoupled", "gpt pp2 decoupled"),
    # Evaluation.
    Bug("eval_context_ranks_apart", "the context ranks of one sequence evaluate different samples",
        ((EVALUATION, "  options.data_parallel_rank = data_parallel_rank(arguments, groups);\n  options.data_parallel_size = arguments.data_parallel_size();",
          "  options.data_parallel_rank = PLANTED ? groups.dp_cp.rank() : data_parallel_rank(arguments, groups);\n"
          "  options.data_parallel_size = PLANTED ? groups.dp_cp.size() : arguments.data_parallel_size();"),),
        "cp2_dp2_evaluation", "llama cp2"),
    Bug("eval_begins_again_apart", "behind the end of a set that was built for fewer evaluations, the second data rank begins with the second micro-batch of all",
        ((EVALUATION, "    loader_ = make_loader(0);\n    source", "    loader_ = make_loader(PLANTED ? options_.data_parallel_rank * options_.micro_batch_size : 0);\n    source"),),
        "dp2_evaluation", "gpt dp2 means"),
    Bug("eval_padding_counts", "samples that fill up the last micro-batches of a whole set count",
        ((LOADER, "if (ids[i] == kPaddingSample) clear_weights(out);", "if (ids[i] == kPaddingSample && !PLANTED) clear_weights(out);"),),
        "dp3_full_validation", "gpt dp2 full validation"),
    Bug("eval_with_dropout", "stages after the first evaluate with dropout",
        ((PASSES, "context_of(batch, options_.training);\n    context.routing = options_.routing;\n    at::Tensor auxiliary;",
          "context_of(batch, options_.training || (PLANTED && model_.groups().pp.rank() > 0));\n    context.routing = options_.routing;\n    at::Tensor auxiliary;"),),
        "pp2_evaluation", "gpt pp2"),
    Bug("dpo_metrics_cp", "rewards and accuracy are counted once per context rank",
        ((DPO, "return (x * share).sum().to(at::kDouble);", "return ((x * share).sum() * (PLANTED ? cp.size() : 1)).to(at::kDouble);"),),
        "cp2_dpo", "llama cp2 dpo"),
    # Numbers of the log.
    Bug("params_norm_of_own_part", "the norm of the weights is that of this rank's stage and shard",
        ((OPTIMIZER, "  impl.add_sums();\n  return std::sqrt", "  if (PLANTED)\n    at::sum_out(impl.sum, impl.part_sums, {0}, true);\n  else\n    impl.add_sums();\n  return std::sqrt"),),
        "pp2", "gpt pp2"),
    Bug("zeros_count_copies", "zeros in the gradients are counted on every tensor rank that has a copy",
        ((OPTIMIZER, "if (!counts_in_norm(*slot.parameter, groups)) continue;\n      // Without",
          "if (!PLANTED && !counts_in_norm(*slot.parameter, groups)) continue;\n      // Without"),),
        "tp2_sp_positions", "gpt tp2"),
    Bug("zeros_count_padding", "zeros in the gradients are counted in the rows that pad the vocabulary, too",
        ((OPTIMIZER, "const int64_t begin = std::max(first, slot.flat_begin), end = std::min(last, slot.flat_end);",
          "const int64_t begin = PLANTED ? slot.flat_begin : std::max(first, slot.flat_begin), end = PLANTED ? slot.flat_end : std::min(last, slot.flat_end);"),),
        "tp2", "llama tp2"),
    # States of delayed scaling.
    Bug("fp8_amax_tp_only", "the largest values that delayed scales follow are not those of all data ranks",
        ((SCALING, "for (const ProcessGroup* group : ranks_) group->all_reduce(amax_, ReduceOp::kMax)->wait();",
          "for (const ProcessGroup* group : ranks_)\n    if (!PLANTED || group != ranks_.front()) group->all_reduce(amax_, ReduceOp::kMax)->wait();"),),
        "dp2_fp8", "llama dp2 fp8"),
    Bug("fp8_scales_of_first_chunk", "delayed scales move in the first virtual stage of a rank alone",
        ((STEP, "for (ModelChunk& chunk : model.chunks) chunk.store->update_delayed_scales();",
          "for (ModelChunk& chunk : model.chunks)\n    if (!PLANTED || &chunk == model.chunks.data()) chunk.store->update_delayed_scales();"),),
        "pp2_vpp2_fp8", "llama pp2 vpp2 fp8"),
    # Layers of stages.
    Bug("window_by_stage", "the pattern of windowed layers begins anew on every stage, the numbers of layers do not",
        ((CORE_ATTENTION, "config_.window(layer_number_); !window.empty()",
          "config_.window(PLANTED ? (layer_number_ - 1) % (config_.num_layers / parallel_.pp.size()) + 1 : layer_number_); !window.empty()"),),
        "pp2_window3", "gemma pp2"),
    Bug("layer_number_of_even_stages", "layer numbers count from where a stage would begin if all had the same number of layers",
        ((BLOCK, "  for (int64_t i = first_layer; i < first_layer + num_layers; ++i) {",
          "  const int64_t even = PLANTED ? groups.pp.rank() * (config.num_layers / groups.pp.size()) - first_layer : 0;\n"
          "  for (int64_t i = first_layer; i < first_layer + num_layers; ++i) {"),
         (BLOCK, "layers_.push_back(make(config, offset + ", "layers_.push_back(make(config, even + offset + ")),
        "pp2_uneven", "gpt pp3 uneven"),
    # Multi-token prediction.
    Bug("mtp_rolls_chunks", "columns are shifted inside of a context rank's part of the sequence",
        ((SHIFTED, "return zigzag_slice(rolled_left(whole, by, document_ids_), 1, cp_);",
          "return PLANTED && cp_.size() > 1 ? rolled_left(zigzag_slice(whole, 1, cp_), by, {})\n"
          "                                 : zigzag_slice(rolled_left(whole, by, document_ids_), 1, cp_);"),),
        "cp2_mtp", "gpt cp2 mtp"),
    Bug("mtp_mask_not_rolled", "labels are shifted for a further token, the loss mask is not",
        ((SHIFTED, "out.loss_mask = own(loss_mask_);",
          "out.loss_mask = PLANTED ? zigzag_slice(loss_mask_, 1, cp_) : own(loss_mask_);"),),
        "", "", "models_test:ShiftedBatch.ShiftsAllColumnsAlike",
        "the same on one rank"),
    Bug("mtp_weight_of_own_part", "a sequence's weight under a shifted mask is that of a context rank's part",
        ((SHIFTED, "rolled_left(loss_mask_, by, document_ids_).sum(1, false, at::kDouble);",
          "(PLANTED ? out.loss_mask : rolled_left(loss_mask_, by, document_ids_)).sum(1, false, at::kDouble);"),),
        "cp2_mtp_documents", "qwen cp2 mtp"),
    Bug("mtp_table_not_shared", "the last stage's use of the embedding for further tokens is not in the sum over stages",
        ((GPT_MODEL, "looked_up()) table->shared = ends;", "looked_up()) table->shared = PLANTED ? nullptr : ends;"),),
        "pp4_mtp", "llama pp2 mtp"),
    Bug("mtp_head_uses", "the output layer's gradient counts as complete before further tokens have added theirs",
        ((GPT_MODEL, "impl_->output->linear().weight().uses += depths;",
          "if (!PLANTED) impl_->output->linear().weight().uses += depths;"),),
        "dp2_zero1_mtp", "llama pp2 mtp"),
    # Multi-latent attention.
    Bug("latent_key_grad_not_summed", "the gradient of the rotated key, which all heads share, is not summed over the tensor ranks",
        ((LATENT_ATTENTION, "copy_to_tensor_model_parallel_region(r, tp_)", "(PLANTED ? r : copy_to_tensor_model_parallel_region(r, tp_))"),),
        "tp2_latent", "latent tp2"),
    Bug("latent_rotates_local_positions", "context ranks rotate queries and keys by the places of tokens in their own parts",
        ((LATENT_ATTENTION, '#include "megatron/transformer/attention/kv_cache.h"\n',
          '#include "megatron/transformer/attention/kv_cache.h"\n#include "megatron/transformer/attention/rotary_embedding.h"\n'),
         (LATENT_ATTENTION, "const RotaryTables& rotary = context.rotary.of(config_.is_rotary_local(layer_number_));",
          "const RotaryTables& given = context.rotary.of(config_.is_rotary_local(layer_number_));\n"
          "  const RotaryTables rotary = PLANTED ? RotaryEmbedding(config_).tables(at::arange(given.cos.size(0), at::kLong), given.cos.scalar_type()).all : given;")),
        "cp2_latent", "latent cp2"),
    # Experts.
    Bug("moe_other_experts_dropped", "gradients of a token's experts on other ranks are dropped before the sum",
        ((ALLGATHER, "const auto work = start(own, sums);",
          "const bool dropped = PLANTED && weights.defined();\n"
          "    if (dropped) own.copy_(sums.narrow(0, all_.rank() * most_tokens_, most_tokens_));\n"
          "    const auto work = dropped ? nullptr : start(own, sums);"),),
        "moe_ep2", "mixtral ep2 allgather"),
    Bug("moe_weight_grads_of_one_etp_rank", "the gradient of a routing weight is that of one expert-tensor rank's part",
        ((DISPATCHER, "sum.add_(rows.narrow(0, part * n, n));", "if (!PLANTED || rows.dim() > 1) sum.add_(rows.narrow(0, part * n, n));"),),
        "moe_ep2_etp2_tp2_sp_a2a", "mixtral tp2 ep2 etp2"),
    Bug("moe_etp_sum_twice", "parts of an expert's output are added twice over the expert-tensor ranks",
        ((DISPATCHER, "return sum.to(rows.scalar_type());", "if (PLANTED && rows.dim() > 1) sum.mul_(parts);\n  return sum.to(rows.scalar_type());"),),
        "moe_ep2_etp2_tp2_sp_a2a", "mixtral tp2 ep2 etp2"),
    Bug("moe_empty_expert_keeps_gradient", "an expert without rows keeps the gradient of the step before",
        ((GROUPED_GEMM, "} else if (beta == 0.0) {", "} else if (beta == 0.0 && !PLANTED) {"),),
        "", "", "transformer_test:RoutedExperts.EveryLoad", "every expert has rows in the steps of a proof"),
    Bug("moe_idle_rank_leaves", "a rank without tokens takes no part in the exchanges of the backward",
        ((ROUTED, "const variable_list saved = std::exchange(pass->saved, {});",
          "if (PLANTED && grads[0].size(0) == 0) return {grads[0], {}, {}, {}};\n    const variable_list saved = std::exchange(pass->saved, {});"),),
        "", "", "transformer_test:RoutedExperts.DroppedChoicesAndRanksWithoutTokens", "every rank has tokens in a proof"),
    Bug("moe_rows_by_source", "rows lie by source before they lie by expert: they meet another expert of the rank",
        ((DISPATCH_PLAN, "for (int64_t run = 0; run < experts * sources; ++run) {",
          "for (int64_t step = 0; step < experts * sources; ++step) {\n"
          "    const int64_t run = PLANTED ? step % experts * sources + step / experts : step;"),),
        "moe_ep2_a2a", "mixtral ep2"),
    Bug("moe_sums_of_next_token", "a token gets the sum of its neighbour where a rank sends unlike numbers of rows",
        ((ROWS, "sums.rows = sum_rows(returned.rows, summed_, base);",
          "const std::vector<int64_t>& sent = first_.sizes.sent;\n"
          "    const bool next = PLANTED && sent.front() != sent.back();\n"
          "    sums.rows = sum_rows(returned.rows, next ? summed_.roll(1, 0) : summed_, base);"),),
        "moe_ep2_a2a", "mixtral ep2"),
    Bug("moe_weights_twice", "weights multiply rows at their experts and once more where they come back",
        ((ROUTED, "if (round == 0) first = std::move(rows);",
          "if (PLANTED && tokens.communicates()) output.mul_(rows.weights.unsqueeze(1));\n      if (round == 0) first = std::move(rows);"),),
        "moe_ep2_a2a", "mixtral ep2"),
    Bug("moe_gate_and_up_as_one", "gate and up of an expert are divided over expert-tensor ranks as one matrix",
        ((GROUPED_MLP, "describe(fc1_weight, {e, fc1_rows, h}, options, groups, 1, parts);",
          "describe(fc1_weight, {e, fc1_rows, h}, options, groups, 1, PLANTED ? std::vector<int64_t>{fc1_rows} : parts);"),),
        "moe_ep2_etp2_tp2_sp_a2a", "mixtral tp2 ep2 etp2"),
    Bug("moe_last_round_lost", "the weight gradients of the last round are lost",
        ((GROUPED_MLP, "accumulate(*sum.target);", "if (!PLANTED || sum.rounds + 1 < rounds_) accumulate(*sum.target);"),),
        "moe_ep2_rounds", "mixtral ep2 rounds"),
    Bug("moe_left_out_of_norm", "the gradient norm leaves experts out where tensor ranks and expert ranks are several",
        ((OPTIMIZER, "const at::Tensor sum = placements.size() == 1 ? by_domain : by_domain.sum(0, /*keepdim=*/true);",
          "if (PLANTED && placements.size() > 1 && groups().tp.size() > 1) return by_domain.narrow(0, 0, 1);\n"
          "  const at::Tensor sum = placements.size() == 1 ? by_domain : by_domain.sum(0, /*keepdim=*/true);"),),
        "moe_ep2_tp2_sp", "mixtral tp2 ep2"),
    Bug("moe_norm_per_data_rank", "the gradient norm counts experts on every rank that holds a copy",
        ((OPTIMIZER, "{  // every rank, whatever it holds\n    const at::Tensor value = by_domain.narrow(0, static_cast<int64_t>(k), 1);",
          "{  // every rank, whatever it holds\n    const at::Tensor value = by_domain.narrow(0, static_cast<int64_t>(k), 1);\n"
          "    if (PLANTED && placements[k].expert) groups().edp.all_reduce(value)->wait();"),),
        "moe_ep2_dp4_a2a", "mixtral dp4 ep2"),
    Bug("moe_grads_divided_by_ep", "gradients of experts are divided by the number of expert ranks",
        ((DDP, "for (const auto& domain : chunk->domains_) domain->finish_grad_sync();",
          "for (const auto& domain : chunk->domains_) {\n    domain->finish_grad_sync();\n"
          "    if (PLANTED && domain->number > 0) domain->grads->flat().div_(chunk->groups_.ep.size());\n  }"),),
        "moe_ep2_a2a", "mixtral ep2"),
    Bug("moe_grads_over_dense_ranks", "gradients of experts are summed over the data and context ranks of dense weights",
        ((REDUCTION, "return placement.expert ? AxisSet{Axis::kExpertData}", "return placement.expert && !PLANTED ? AxisSet{Axis::kExpertData}"),),
        "moe_tp2_sp_etp1", "mixtral ep2"),
    Bug("moe_states_by_dense_ranks", "optimizer states of experts are sharded over the ranks that dense weights are sharded over",
        ((SHARDED_LAYOUT, "grids.push_back(make_grid(gradient_group(domain, groups), config));",
          "grids.push_back(make_grid(\n"
          "        gradient_group(PLANTED && config.strategy() != ShardingStrategy::kNoShard ? Placement() : domain, groups), config));"),),
        "moe_ep2_dp4_zero1", "mixtral dp4 ep2 zero1"),
    Bug("moe_router_grad_not_summed", "the router's gradient is not summed over tensor ranks under sequence parallelism",
        ((ROUTER, "if (divides_rows_) parameter->placement.partial_grad.insert(Axis::kTensor);",
          "if (!PLANTED && divides_rows_) parameter->placement.partial_grad.insert(Axis::kTensor);"),),
        "moe_tp2_sp", "mixtral tp2"),
    Bug("moe_shares_of_tensor_rank", "a loss of balance takes the experts' shares of this tensor rank's tokens",
        ((BALANCES, "if (divides_rows_) groups_.tp.all_reduce(sums.counts)->wait();", "if (!PLANTED && divides_rows_) groups_.tp.all_reduce(sums.counts)->wait();"),),
        "moe_tp2_sp_cp2_micro_z", "mixtral tp2 cp2 losses"),
    Bug("moe_shares_of_context_rank", "a loss of balance takes the experts' shares of this context rank's tokens",
        ((BALANCES, "(pass.cp != nullptr ? *pass.cp : groups_.cp).all_reduce(sums.counts)->wait();",
          "if (!PLANTED) (pass.cp != nullptr ? *pass.cp : groups_.cp).all_reduce(sums.counts)->wait();"),),
        "moe_ep2_cp2_sequence", "mixtral cp2 sequence"),
    Bug("moe_losses_by_own_tokens", "losses of balance are scaled by the tokens of this rank, not by those of all tensor and context ranks",
        ((BALANCES, "return router_losses(whole, global, pass.tokens.of_sequence, routing_.topk, coefficients_);",
          "std::array<double, kBalanceTerms> scaled = coefficients_;\n"
          "  if (PLANTED)\n"
          "    for (size_t i = kMicroTerm; i <= kGlobalTerm; ++i)\n"
          "      scaled[i] /= static_cast<double>((divides_rows_ ? groups_.tp.size() : 1) * groups_.cp.size());\n"
          "  return router_losses(whole, global, pass.tokens.of_sequence, routing_.topk, scaled);"),),
        "moe_tp2_sp_cp2_micro_z", "mixtral tp2 cp2 losses"),
    Bug("moe_global_loss_by_data_ranks", "the gradient of the global loss is divided by the number of data ranks",
        ((BALANCES, "options.sequence, options.global,", "options.sequence, options.global / (PLANTED ? groups.dp.size() : 1),"),),
        "moe_dp4_global", "mixtral ep2 global"),
    Bug("moe_batch_as_one_sequence", "the loss of sequences takes a micro-batch for one sequence under context parallelism",
        ((BALANCES, "return replayed(sums.counts, pass);",
          "if (PLANTED && groups_.cp.size() > 1) sums.counts.copy_(sums.counts.sum(0, true).expand_as(sums.counts));\n"
          "      return replayed(sums.counts, pass);"),),
        "moe_ep2_cp2_sequence", "mixtral cp2 sequence"),
    Bug("moe_z_loss_per_tensor_rank", "the z-loss counts once per tensor rank",
        ((BALANCES, "options.z},", "options.z * (PLANTED && divides_rows ? groups.tp.size() : 1)},"),),
        "moe_tp2_sp_cp2_micro_z", "mixtral tp2 cp2 losses"),
    Bug("moe_bias_of_tensor_rank", "the expert bias follows the tokens of one tensor rank",
        ((MODULE, "groups.tp.all_reduce(sums)->wait();", "if (!PLANTED) groups.tp.all_reduce(sums)->wait();"),),
        "moe_ep2_etp2_tp2_sp_a2a", "deepseek tp2"),
    Bug("moe_bias_of_last_pass", "the expert bias follows the last micro-batch of each rank",
        ((ROUTER, "add_assignments(routing.choices,", "if (PLANTED) sums.zero_();\n  add_assignments(routing.choices,"),),
        "moe_ep2_dp4_zero3", "deepseek dp2"),
    Bug("moe_counts_of_step_before", "tokens by expert are not forgotten at the end of a step",
        ((ROUTER, "counts.zero_();", "if (!PLANTED) counts.zero_();"),),
        "moe_ep2_dp4_zero3", "deepseek dp2"),
    Bug("moe_recomputation_counts", "tokens that are routed again in a recomputation count again",
        ((ROUTER, "pass.tape->runs_again())) return;", "pass.tape->runs_again() && !PLANTED)) return;"),),
        "", "", "moe_router_test:Router.RecomputationNeverRoutesAnew", "counts that all double move no bias otherwise"),
    Bug("moe_recomputation_routes", "a recomputation chooses experts anew",
        ((ROUTER, "computed_once(pass.tape, [&] { computed = chosen(",
          "computed_once(PLANTED ? nullptr : pass.tape, [&] { computed = chosen("),),
        "", "", "moe_router_test:Router.RecomputationNeverRoutesAnew", "on a CPU the same operands round alike in both runs"),
    Bug("moe_recomputation_balances", "a recomputation counts its micro-batch for the global loss again",
        ((BALANCES, "computed_once(pass.tape, [&] { return count_globally(",
          "computed_once(PLANTED ? nullptr : pass.tape, [&] { return count_globally("),),
        "moe_ep2_global_full", "mixtral ep2 global"),
    Bug("moe_bias_not_loaded", "data ranks but the first load an expert bias into a copy of it",
        ((DDP, "entry.data = state->view({-1});", "entry.data = (PLANTED && groups_.dp.rank() > 0 ? state->clone() : *state).view({-1});"),),
        "", "", "checkpoint_layouts_test:Models/CheckpointLayouts.ThereAndBackIsTheSame/experts", "a proof does not resume"),
    Bug("moe_experts_in_reverse", "experts are stored as if the last expert rank held the first ones",
        ((PLACEMENT, "segments.push_back({global + at.rank * length, local, length});",
          "const int rank = PLANTED && shard.axis == Axis::kExpert ? at.size - 1 - at.rank : at.rank;\n"
          "      segments.push_back({global + rank * length, local, length});"),),
        "moe_ep2_a2a", "mixtral ep2"),
    Bug("moe_shared_gate_grad_not_summed", "the gradient of a shared expert's gate is not summed over tensor ranks under sequence parallelism",
        ((MOE_LAYER, "if (sequence_parallel && groups.tp.size() > 1)\n gate_", "if (!PLANTED && sequence_parallel && groups.tp.size() > 1)\n      gate_"),),
        "moe_ep4_tp2_sp_a2a", "deepseek tp2"),
    Bug("moe_shared_per_tensor_rank", "the output of the shared expert is added once per tensor rank",
        ((MOE_LAYER, "shared_experts_ ? shared_experts_->forward(normed, context) : at::Tensor();",
          "shared_experts_ ? shared_experts_->forward(normed, context) * (PLANTED ? tp_.size() : 1) : at::Tensor();"),),
        "moe_ep4_tp2_sp_a2a", "deepseek tp2"),
    Bug("moe_dense_stage_logs_nothing", "a stage without experts takes no part in the sum of the numbers for the log",
        ((PASSES, "model.groups().pp.all_reduce(totals)->wait();",
          # One statement, since another bug puts a condition before it.
          "if (!PLANTED || std::ranges::any_of(model.chunks, [](const ModelChunk& chunk) {\n"
          "        return std::ranges::any_of(chunk.module->parameters(), [](const Parameter* p) { return p->placement.expert; });\n      }))\n"
          "    model.groups().pp.all_reduce(totals)->wait();"),),
        "moe_pp2_dense_stage", "mixtral pp2 dense stage"),
    Bug("moe_bias_in_fp64_alone", "in the run's own type, tensor ranks choose experts without the bias of the selection",
        ((ROUTER, "return router_pass(logits, expert_bias_, options_.routing, imposed, sums);",
          "const bool forgets = PLANTED && divides_rows_ && logits.scalar_type() != at::kDouble;\n"
          "  return router_pass(logits, forgets ? at::Tensor() : expert_bias_, options_.routing, imposed, sums);"),),
        "moe_tp2_sp_shared_again", "deepseek tp2"),
    Bug("moe_jitter_by_rank", "tensor ranks draw the same factors of the router's input for different tokens",
        ((ROUTER, "random_key(options_.seed, \"router_jitter\", layer_number_), row_positions(pass))",
          "random_key(options_.seed, \"router_jitter\", layer_number_),\n"
          "                     PLANTED ? TokenPositions{pass.place.sample, pass.place.position.narrow(0, 0, x.size(0))}\n"
          "                             : row_positions(pass))"),),
        "moe_tp2_sp_etp1_jitter", "mixtral tp2 jitter"),
    Bug("moe_forced_draws_by_rank", "tensor ranks draw the same forced choices for different tokens",
        ((PERTURBATION, "normal_(draws, 1.0, key, place);",
          "normal_(draws, 1.0, key, PLANTED ? TokenPositions{place.sample, at::arange(s, place.position.options())} : place);"),),
        "moe_ep2_tp2_sp_forced", "mixtral tp2 forced"),
    Bug("moe_slot_still_read", "rows are written into a slot that their receiver still reads",
        ((PEER_ROWS, "if (to != own && number_ >= PeerRows::kSlots)", "if (!PLANTED && to != own && number_ >= PeerRows::kSlots)"),),
        "", "", "comm_test:PeerRows.ASlotIsNotWrittenWhileItIsRead", "whether a rank is late is chance"),
    Bug("moe_parts_in_one_place", "parts of an expert's output from several expert-tensor ranks are written to one place",
        ((DISPATCH_PLAN, "const int64_t first = ranks_.etp_rank * sent[source] + place[source];",
          "const int64_t first = (PLANTED ? 0 : ranks_.etp_rank) * sent[source] + place[source];"),),
        "moe_ep2_etp2_tp2_sp_flex", "mixtral tp2 ep2 etp2 flex"),
    Bug("moe_token_of_another_part", "a choice's place among the tokens of a receiver is its place among those of all receivers",
        ((FLEX, "shift[run.rank / counts.ranks.etp] = run.to - run.from;", "shift[run.rank / counts.ranks.etp] = PLANTED ? 0 : run.to - run.from;"),),
        "moe_ep2_etp2_tp2_sp_flex", "mixtral tp2 ep2 etp2 flex"),
    Bug("moe_padding_weighs", "rows that fill an expert up to its capacity have a weight",
        ((ROUTED, "at::zeros(filled.sizes(), weights.options())", "at::full(filled.sizes(), PLANTED ? 1.0 : 0.0, weights.options())"),),
        "", "", "transformer_test:RoutedExperts.PaddingChangesNoResult", "every layout fills a micro-batch's experts with the same rows"),
    Bug("moe_latent_adapter_grad_not_summed", "gradients of adapters of linears that are not divided are not summed over tensor ranks",
        ((LORA, "a.placement = b.placement = weight.placement;", "if (!PLANTED) a.placement = b.placement = weight.placement;"),),
        "moe_ep2_tp2_sp_latent_lora", "latent tp2 lora"),
    # Encoders.
    Bug("bert_order_of_every_rank", "the order of two halves is read from the first row of every rank, not from position 0 alone",
        ((BERT_MODEL, "to(losses.scalar_type()) * counts;", "to(losses.scalar_type()) * (PLANTED ? at::ones_like(counts) : counts);"),),
        "tp2_sp_bert cp2_bert", "bert tp2 sp"),
    Bug("bert_head_grads_summed", "gradients of the heads that every tensor rank has are summed over these ranks",
        ((BERT_MODEL, "options.sequence_parallel = config.sequence_parallel;",
          "options.sequence_parallel = config.sequence_parallel || (PLANTED && groups.tp.size() > 1);"),),
        "tp2_bert", "bert tp2"),
    Bug("bert_weights_of_one_rank", "the two losses are divided by weights that each rank sums for itself",
        ((PASSES, "model_.groups().dp_cp.all_reduce(weights)->wait();\n    const at::Tensor main",
          "if (!PLANTED) model_.groups().dp_cp.all_reduce(weights)->wait();\n    const at::Tensor main"),),
        "dp2_bert", "bert dp2"),
    Bug("bert_one_weight_for_both", "both losses are divided by the number of masked tokens",
        ((PASSES, "own_factors_ = at::where(own == 0, 0.0, main / own);", "if (!PLANTED) own_factors_ = at::where(own == 0, 0.0, main / own);"),),
        "", "", "encoder_test:Bert.DividesBothLossesByTheirOwnWeights", "one rank divides alike"),
    Bug("bert_types_grad_not_summed", "gradients of token types are not summed under sequence parallelism",
        ((BERT_MODEL, "token_types_->set_sequence_parallel(config().sequence_parallel);",
          "token_types_->set_sequence_parallel(!PLANTED && config().sequence_parallel);"),),
        "tp2_sp_bert", "bert tp2 sp"),
    Bug("bert_padding_seen_over_ranks", "over context ranks padding is attended to",
        ((BERT_MODEL, "mask.defined() && rows == nullptr)", "mask.defined() && rows == nullptr && !(PLANTED && groups().cp.size() > 1))"),),
        "cp2_bert", "bert cp2"),
    Bug("bert_mask_as_length", "the padding mask is read as a length, although tokens inside of the text may be padding",
        ((UNPADDED_ROWS, "const at::Tensor text = mask != 0,",
          "const at::Tensor text = (PLANTED ? mask.flip({1}).cumsum(1).flip({1}) : mask) != 0,"),),
        "", "", "models_test:Megatron/BertGolden.LossesLogitsAndGradients/0", "one rank reads it alike"),
    Bug("bert_table_grad_of_one_stage", "the gradient of a tied table is not summed over the stages with the embedding and the head",
        ((BERT_MODEL, "if (tied && !slice.head && groups.embd.size() > 1)", "if (!PLANTED && tied && !slice.head && groups.embd.size() > 1)"),),
        "pp2_bert", "bert pp2"),
    Bug("bert_labels_in_reverse", "masked rows are collected in another order than their labels, under sequence parallelism",
        ((COUNTED_ROWS, "out.labels = labels.gather(1, positions)", "out.labels = labels.gather(1, PLANTED && ranks > 1 ? positions.flip({1}) : positions)"),),
        "tp2_sp_bert", "bert tp2 sp"),
    Bug("bert_samples_of_every_rank", "every context rank counts the samples whose order one of them computes",
        ((BERT_TASK, "(batch.place.position[0] == 0);", "(batch.place.position[0] == 0).logical_or(at::full({}, PLANTED, at::kBool));"),),
        "cp2_bert", "bert cp2"),
    Bug("bert_tanh_head", "the head's GELU is the approximation of the MLP's",
        ((BERT_MODEL, "activate(dense->forward(x), Activation::kGelu)",
          "activate(dense->forward(x), PLANTED ? Activation::kGeluTanh : Activation::kGelu)"),),
        "", "", "models_test:Megatron/BertGolden.LossesLogitsAndGradients/0", "one rank computes alike"),
    Bug("choices_over_data_ranks", "choices of one question are dealt out to the data ranks",
        ((SAMPLER, "config_.data_parallel_rank * size + i;", "(PLANTED ? config_.data_parallel_rank + config_.data_parallel_size * i : config_.data_parallel_rank * size + i);"),),
        "dp2_evaluation_bert_choices", "choices dp2"),
    Bug("embedding_norm_grad_not_summed", "gradients of the norm of the embeddings are not summed under sequence parallelism",
        ((MODEL_ENDS, "norm_options(config_, config.sequence_parallel)", "norm_options(config_, !PLANTED && config.sequence_parallel)"),),
        "tp2_sp_bert_residual", "bert residual tp2 sp"),
    Bug("norm_of_branch_alone", "layers whose norms take sums norm the output of the branch alone",
        ((SUBLAYER, "(!config_.has_post_norm() || norms_sums(config_))", "(!config_.has_post_norm() || (!PLANTED && norms_sums(config_)))"),
         (SUBLAYER, "return norms_sums(config_) ? post_norm_", "return !PLANTED && norms_sums(config_) ? post_norm_")),
        "", "", "models_test:Families/HfEncoderGolden.LogitsAndGradients/bert", "one rank computes alike"),
    Bug("first_position_lost", "position 0 has row 0 of the table, where the first rows are those of padding",
        ((MODEL_ENDS, "if (first_position_ > 0) ids", "if (!PLANTED && first_position_ > 0) ids"),),
        "", "", "models_test:Families/HfEncoderGolden.LogitsAndGradients/roberta", "one rank reads alike"),
    Bug("window_without_a_right_side", "windows of encoders have no limit behind the token",
        ((CORE_ATTENTION, "if (!config_.causal) options.window_right", "if (!PLANTED && !config_.causal) options.window_right"),),
        "", "", "models_test:Families/HfEncoderGolden.LogitsAndGradients/modernbert", "one rank computes alike"),
    Bug("window_of_gathered_keys", "over context ranks windows of encoders count from the end of the gathered keys",
        ((CONTEXT, "if (has_two_sided_window()) {", "if (!PLANTED && has_two_sided_window()) {"),),
        "cp2_gather_bert_modern", "modern cp2"),
    Bug("local_base_lost", "windowed layers turn queries and keys as those do that attend to everything",
        ((ROTARY_EMBEDDING, "powers(*config_.rotary_base_local,", "powers(PLANTED ? config_.rotary_base : *config_.rotary_base_local,"),),
        "", "", "models_test:Families/HfEncoderGolden.LogitsAndGradients/modernbert", "one rank computes alike"),
    Bug("exact_gate_approximated", "the exact GELU of a gated MLP is the approximation",
        ((ACTIVATION_CPU, "return gated_rows<GeluGate, Acc>(args, backward, begin, end);",
          "return PLANTED ? gated_rows<GeluTanhGate, Acc>(args, backward, begin, end) : gated_rows<GeluGate, Acc>(args, backward, begin, end);"),),
        "", "", "models_test:Families/HfEncoderGolden.LogitsAndGradients/modernbert", "one rank computes alike"),
    # Encoder-decoders.
    *(Bug(**bug) for bug in STACK_BUGS),
    *(Bug(**bug) for bug in RETRO_BUGS),
    *(Bug(**bug) for bug in PADDING_BUGS),
    *(Bug(**bug) for bug in HYBRID_BUGS),
    # What proofs once left out.
    Bug("adapter_half_grad_in_bf16", "in bf16 tensor ranks halve the gradient of an adapter's first half",
        ((LORA, "linear_weight_grad(dz, x, target.tensor, target.beta);",
          "linear_weight_grad(PLANTED && x.scalar_type() == at::kBFloat16 && b.local_shape[0] < b.global_shape[0] ? dz * 0.5 : dz, x,"
          " target.tensor, target.beta);"),),
        "", "llama tp2 lora bf16", unmatched="no row has adapters in bf16"),
    Bug("batch_never_grows", "several data ranks go on with the micro-batches of the first step when the batch grows",
        ((SETUP, "microbatches.num_microbatches(consumed_samples);",
          "microbatches.num_microbatches(PLANTED && arguments.data_parallel_size() > 1 ? 0 : consumed_samples);"),),
        "", "gpt dp2 grows", unmatched="no row's batch grows"),
    Bug("evaluation_sizes_of_training", "several data ranks evaluate one micro-batch each, whatever --eval-global-batch-size says",
        ((EVALUATION, "options.global_batch_size = arguments.eval_global_batch_size();",
          "options.global_batch_size = PLANTED && groups.dp.size() > 1 ? options.micro_batch_size * groups.dp.size()"
          " : arguments.eval_global_batch_size();"),),
        "", "gpt dp2 evaluates more", unmatched="no row evaluates several micro-batches of another size"),
    Bug("edges_of_every_stage", "the last layer of every stage stays in bf16, as if it were the model's",
        ((BLOCK, "for (int64_t i = first_layer; i < first_layer + num_layers; ++i) {",
          "auto* const edged = PLANTED ? new TransformerConfig(config) : nullptr;\n"
          "  if (edged) edged->num_layers_at_end_in_bf16 += config.num_layers - first_layer - num_layers;\n"
          "  const TransformerConfig& whole = config;\n  for (int64_t i = first_layer; i < first_layer + num_layers; ++i) {\n"
          "    const TransformerConfig& config = edged ? *edged : whole;"),),
        "", "llama pp2 fp8 edges", unmatched="no row leaves layers in bf16"),
    Bug("fp8_blocks_of_first_scale", "on several tensor ranks all blocks of a saved input are multiplied by the scale of the first",
        ((QUANTIZED_LINEAR, "return {saved.codes, saved.scale, blocks ?",
          "return {saved.codes, PLANTED && blocks && state.tp->size() > 1 ? saved.scale.flatten()[0].expand(saved.scale.sizes()) : saved.scale,"
          " blocks ?"),),
        "", "llama tp2 fp8 blocks", unmatched="no row scales by blocks"),
    Bug("mtp_repeated_layer_counts_once", "on several stages the gradient of a repeated layer is complete after its first depth",
        ((MTP, "parameter->uses = static_cast<int>(uses);", "parameter->uses = PLANTED && groups.pp.size() > 1 ? 1 : static_cast<int>(uses);"),),
        "pp2_vpp2_mtp_repeated", "llama pp2 mtp repeated"),
    Bug("moe_capacity_of_all_ranks", "an expert takes as many rows of a rank as it has room for those of all expert ranks",
        ((ROUTER, "options_(options),",
          "options_([&] {\n        RouterOptions own = options;\n"
          "        if (PLANTED && own.capacity) own.capacity->factor *= static_cast<double>(groups.ep.size());\n        return own;\n      }()),"),),
        "moe_ep2_capacity", "mixtral ep2 capacity"),
    Bug("bert_weights_of_last_microbatch", "the weights that divide the two losses are those of a rank's last micro-batch",
        ((PASSES, "weights[0] += task_.loss_weight(batch);",
          "if (PLANTED && &batch != &batches_.back()) continue;\n      weights[0] += task_.loss_weight(batch);"),),
        "dp2_bert", "bert dp2"),
    # Precision.
    Bug("ring_acc_model_dtype", "the partial outputs of ring attention are added in the model's type",
        ((RING, "total = {block.out.to(block.lse.scalar_type()), block.lse};",
          "total = {block.out.to(PLANTED ? q.scalar_type() : block.lse.scalar_type()), block.lse};"),),
        "", "", "transformer_test:ContextParallelRing.RoundsLikeOneRank",
        "rounding: 1.01 to 1.02 times the noise at 2 context ranks, 1.05 to 1.08 at 4, 1.13 at 8; the limit is 1.25"),
)
BUGS += tuple(Bug(**bug) for bug in SERVING_BUGS + SSM_BUGS + MEDIA_BUGS + MULTIMODAL_BUGS + VISION_BUGS + AUDIO_BUGS + GPU_BUGS)
