//! The list of promises, each a plain generic function.
//!
//! A new case here reaches every backend without touching one.
mod attend;
mod buffer;
mod cache;
mod compat;
mod convert;
mod copy;
mod failure;
mod gather;
mod life;
mod lives;
mod quant;
mod queue;
mod random;
mod reuse;
mod segments;
mod unseen;
mod write;

use kv_core::{BlockOrder, CacheSpec, CacheSpecBuilder, KvFormat};

use crate::case::{Case, CaseResult};
use crate::device::Device;
pub(crate) use convert::{End, convert};
pub(crate) use gather::{Form, check as check_gather};
pub(crate) use life::bytes;
pub(crate) use quant::{Likeness, constants};

/// A named case.
fn case<B: Device>(name: &'static str, run: fn(&B) -> CaseResult) -> Case<B> {
    Case { name, run }
}

/// Every case.
pub(crate) fn cases<B: Device>() -> Vec<Case<B>> {
    let areas = [
        buffer::cases(),
        queue::cases(),
        write::cases(),
        attend::cases(),
        unseen::cases(),
        copy::cases(),
        gather::cases(),
        convert::cases(),
        segments::cases(),
        cache::cases(),
        life::cases(),
        compat::cases(),
        failure::cases(),
        quant::cases(),
        random::cases(),
        lives::cases(),
        reuse::cases(),
    ];
    areas.into_iter().flatten().collect()
}

/// A small geometry: 2 layers, 2 kv heads, 8 and 8 values, f32, 16 blocks of 4 tokens.
fn small() -> CacheSpecBuilder {
    CacheSpec::builder().layers(2).kv_heads(2).head_dim(8).format(KvFormat::F32).paged(4, 16)
}

/// Orders of the axes inside a block.
pub(crate) const ORDERS: [BlockOrder; 2] = [BlockOrder::Nhd, BlockOrder::Hnd];
