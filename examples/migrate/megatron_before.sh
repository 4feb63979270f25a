# Before: arguments of Megatron-LM's pretrain_gpt.py
torchrun --nproc-per-node 2 pretrain_gpt.py \
  --num-layers 4 --hidden-size 64 --num-attention-heads 4 \
  --seq-length 64 --max-position-embeddings 64 \
  --micro-batch-size 2 --global-batch-size 16 --train-iters 20 \
  --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 \
  --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 5 --lr-decay-style cosine \
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
  --bf16 --seed 1234 \
  --data-path tokens --split 95,5,0 \
  --save checkpoints --save-interval 10 --eval-interval 10 --eval-iters 2
