"""Attention kernels on a GPU, ours and others', beside what the GPU can do."""
