//! The CUDA backend of the KV cache.
mod gpu;
mod params;
