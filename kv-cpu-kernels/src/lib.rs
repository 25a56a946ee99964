//! The inner loops of attention on CPUs, over rows of K and V in any stored format.
//!
//! A kernel works on slices and on [`KeyRows`], rows of one head at one stride; it knows no plan,
//! block or thread. Each loop exists once, written in the primitives of a vector trait and
//! instantiated for scalar code, AVX2, AVX-512 and NEON:
//!
//! | file | loop |
//! |---|---|
//! | `qk` | dot products of query rows with rows of K |
//! | `softmax` | the online softmax |
//! | `pv` | weighted sums of rows of V |
//! | `decode` | stored formats, one file per family |
//! | `convert` | element types, and rows of `f32` |
//! | `prefetch` | the cursor that issues software prefetches |
//! | `amx` | tiles of scores and sums as matrix products |
//!
//! [`Kernels`] is the safe entry point: it exists only for an [`Isa`] that the CPU has, and every
//! call asserts its bounds once.
//!
//! ```
//! use kv_cpu_kernels::{
//!     Element, Isa, KeyRows, Kernels, Prefetch, PrefetchTarget, Qk, RowLayout, TileRows,
//! };
//!
//! let kernels = Kernels::new(Isa::detect(), PrefetchTarget::None).ok_or("this CPU has it")?;
//! // Two rows of K of eight bf16 ones, and a query row of halves.
//! let (layout, k) = (RowLayout::plain(Element::Bf16, 8), [0x80, 0x3f].repeat(16));
//! let (mut q, mut scores) = ([0.0; 64], [0.0; 16]);
//! q[..8].fill(0.5);
//! let k = KeyRows::new(&k, 16, 2, &layout);
//! kernels.qk(&mut Qk {
//!     rows: 1,
//!     q: &q,
//!     words: None,
//!     q_stride: 64,
//!     k: TileRows::of_run(&k),
//!     scores: &mut scores,
//!     score_stride: 16,
//!     decoded: &mut vec![0.0; kernels.decoded_len(&layout)],
//!     prefetch: &mut Prefetch::none(),
//! });
//! assert_eq!(scores[..2], [4.0, 4.0]);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
#![allow(unsafe_code, reason = "instruction sets: docs/unsafe.md")]
#[cfg(any(target_arch = "x86_64", test, feature = "testing"))]
pub mod amx;
mod convert;
mod decode;
mod features;
mod kernels;
mod layout;
mod load;
mod prefetch;
mod pv;
mod qk;
mod rows;
mod simd;
mod softmax;
mod table;
#[cfg(any(test, feature = "testing"))]
mod testing;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

pub use features::Isa;
pub use kernels::{Kernels, NonTemporal};
pub use layout::{Element, Encoding, RowLayout};
pub use prefetch::{Prefetch, PrefetchTarget};
pub use pv::{OUTPUT_PAD, Pv};
pub use qk::{QUERY_PAD, Qk, SCORE_PAD};
pub use rows::{KeyRows, TileRows};
pub use softmax::{Logits, OnlineSoftmax, Partial, Softmax};
