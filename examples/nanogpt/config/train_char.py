"""A few minutes on two CPU cores: 0.1 million parameters, a context of 32 characters."""

out_dir = "out-char"
dataset = "char"
eval_interval = 250
eval_iters = 20
log_interval = 50

gradient_accumulation_steps = 1
batch_size = 12
block_size = 32

n_layer = 2
n_head = 2
n_embd = 64
dropout = 0.1

learning_rate = 1e-3
max_iters = 2000
lr_decay_iters = 2000
min_lr = 1e-4
warmup_iters = 50
beta2 = 0.99

save_ckpt_time = 1.0
redundant_time = 2.0
