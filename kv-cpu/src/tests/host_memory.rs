//! Caches and host pools that are larger than the memory that they may take.
use std::sync::Arc;

use kv_core::backend::{AnyBackend, Backend, ChunkShape};
use kv_core::error::DeviceErrorKind;
use kv_core::{CacheError, CacheSpec, GroupId, KvCache, KvFormat};

use crate::{CpuBackend, CpuOptions, HostMemory};

/// A layer of 4 blocks, each of 8 tokens, 2 heads and 16 values.
const LAYER_BYTES: u64 = 2 * 4 * 8 * 2 * 16 * 4;

fn backend(limit: u64) -> CpuBackend {
    let options = CpuOptions::default().with_threads(1);
    CpuBackend::open(options.with_host_memory(HostMemory::with_limit(limit))).unwrap()
}

fn spec(layers: u16) -> CacheSpec {
    let spec = CacheSpec::builder().layers(layers).kv_heads(2).head_dim(16).format(KvFormat::F32);
    spec.paged(8, 4).build().unwrap()
}

#[track_caller]
fn assert_refused<T>(made: Result<T, CacheError>, needed: u64, available: u64) {
    let Some(CacheError::Device(error)) = made.err() else { panic!("not refused") };
    assert_eq!(error.kind(), DeviceErrorKind::OutOfMemory);
    let shortage = error.shortage().unwrap();
    assert_eq!((shortage.needed, shortage.available), (needed, available));
    assert!(error.to_string().contains("available"), "{error}");
}

#[test]
fn a_cache_larger_than_memory_is_refused_when_it_is_made() {
    assert_eq!(spec(1).memory().all_bytes(), LAYER_BYTES);
    let backend = Arc::new(backend(10 * LAYER_BYTES));
    assert_refused(
        KvCache::new(Arc::clone(&backend), spec(11)),
        11 * LAYER_BYTES,
        10 * LAYER_BYTES,
    );
    let first = KvCache::new(Arc::clone(&backend), spec(7)).unwrap();
    // The same device behind other types.
    let erased = AnyBackend::new(Arc::clone(&backend));
    assert_refused(KvCache::new(erased.clone(), spec(4)), 4 * LAYER_BYTES, 3 * LAYER_BYTES);
    let second = KvCache::new(erased, spec(3)).unwrap();
    assert_refused(KvCache::new(Arc::clone(&backend), spec(1)), LAYER_BYTES, 0);
    drop((first, second));
    KvCache::new(backend, spec(10)).unwrap();
}

#[test]
fn constants_count_too() {
    let spec =
        CacheSpec::builder().layers(1).kv_heads(2).head_dim(64).format("l4".parse().unwrap());
    let spec = spec.paged(8, 4).build().unwrap();
    let (planes, all) = (spec.memory().bytes_total, spec.memory().all_bytes());
    assert!(planes < all, "a transform has constants");
    assert_refused(KvCache::new(backend(all - 1), spec.clone()), all, all - 1);
    KvCache::new(backend(all), spec).unwrap();
}

#[test]
fn layers_on_demand_are_refused_one_by_one() {
    let spec = CacheSpec::builder().layers_on_demand().kv_heads(2).head_dim(16);
    let spec = spec.format(KvFormat::F32).paged(8, 4).build().unwrap();
    let mut cache = KvCache::new(backend(2 * LAYER_BYTES), spec).unwrap();
    assert!(cache.allocate_layer(0).unwrap() && cache.allocate_layer(5).unwrap());
    assert!(!cache.allocate_layer(0).unwrap());
    assert_refused(cache.allocate_layer(1), LAYER_BYTES, 0);
    assert!(!cache.allocate_layer(5).unwrap(), "what there was stays");
}

#[test]
fn a_host_pool_takes_from_the_same_memory() {
    let cache = KvCache::new(backend(3 * LAYER_BYTES), spec(1)).unwrap();
    let storage = cache.storage(GroupId(0)).unwrap().view();
    let shape = ChunkShape { blocks: 1, header_bytes: 0 };
    // A chunk has a block of both planes, in whole pages.
    let pool = |chunks| cache.backend().host_pool(storage, shape, chunks).map_err(CacheError::from);
    let chunk = 4096;
    let most = u32::try_from(2 * LAYER_BYTES / chunk).unwrap();
    assert_refused(pool(most + 1), u64::from(most + 1) * chunk, 2 * LAYER_BYTES);
    let first = pool(most).unwrap();
    assert_refused(pool(1), chunk, 0);
    drop(first);
    pool(1).unwrap();
}
