//! Sizes of caches against bytes worked out by hand.
use super::sizes::bytes_per_token;
use super::*;
use crate::snapshot_pool::SnapshotPool;
use kv::DType;
use kv::spec::StateFormat;

const SETTINGS: StateSettings = StateSettings {
    sequences: None,
    drafts: 0,
    snapshots: SnapshotPool::DEFAULT,
    format: StateFormat::F16,
    window: DType::F32,
};

fn layer(kv_heads: u32, head_dim: u32, window: Option<u32>) -> LayerGeometry {
    let (head_dim_k, head_dim_v) = (head_dim, head_dim);
    LayerGeometry { kv_heads, head_dim_k, head_dim_v, window, is_latent: false }
}

#[track_caller]
fn check(kinds: &[(LayerGeometry, u32)], run: impl FnOnce(&Plan<'_>)) {
    let stored = Stored::plain("bf16".parse().expect("a format"));
    let kept = Kept { kinds, states: &[] };
    run(&Plan::new(kept, 16, &stored, SETTINGS).expect("a plan"));
}

#[test]
fn latent_rows_are_counted_once_and_stored_twice() {
    let (head_dim_k, head_dim_v, is_latent) = (576, 512, true);
    let latent = LayerGeometry { head_dim_k, head_dim_v, is_latent, ..layer(1, 1, None) };
    check(&[(latent, 61)], |plan| {
        assert_eq!(plan.groups().map(bytes_per_token).sum::<u64>(), 70_272);
        assert_eq!(plan.spec.memory().bytes_per_token, 132_736, "V is stored beside K");
    });
}

#[test]
fn kinds_of_layers_have_their_own_bytes() {
    check(&[(layer(8, 64, Some(128)), 12), (layer(8, 64, None), 12)], |plan| {
        assert_eq!(plan.groups().map(bytes_per_token).collect::<Vec<_>>(), [12 * 2048; 2]);
    });
}

#[test]
fn blocks_that_left_a_window_are_not_counted() {
    check(&[(layer(8, 128, Some(4096)), 32)], |plan| {
        // 4,096 tokens in 256 blocks, and one more if the window begins inside a block.
        let block = 131_072 * 16;
        assert_eq!(plan.sequence_bytes(4096, true), Some(256 * block));
        assert_eq!(plan.sequence_bytes(32_768, true), Some(257 * block));
        assert_eq!(plan.sequence_bytes(32_768, false), Some(2048 * block));
        assert_eq!(plan.tokens_within(257 * block), 257 * 16, "kept at once");
    });
    // Next to layers without windows, only those grow.
    check(&[(layer(8, 64, Some(128)), 12), (layer(8, 64, None), 12)], |plan| {
        let block = 12 * 2048 * 16;
        assert_eq!(plan.sequence_bytes(131_072, true), Some((9 + 8192) * block));
        assert_eq!(plan.tokens_within((9 + 8192) * block), 131_072);
    });
}

#[test]
fn extreme_geometries_are_planned_or_refused() {
    let stored = Stored::plain("bf16".parse().expect("a format"));
    let mut refused = 0;
    for kv_heads in [1, 1 << 20] {
        for head_dim in [1, 1 << 20] {
            for layers in [1, 65_535, 65_536] {
                let kinds = [(layer(kv_heads, head_dim, Some(1)), layers)];
                let kept = Kept { kinds: &kinds, states: &[] };
                refused += u32::from(Plan::new(kept, 16, &stored, SETTINGS).is_err());
            }
        }
    }
    assert!(refused >= 4, "{refused}: a cache has at most 65,535 layers");
}
