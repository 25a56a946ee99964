//! Prefill here, decode there: one instance computes a prompt and writes its blocks to a store, the
//! other one reads them and goes on with the next token.
//!
//! `cargo run --release -p kv --features tier --example handoff -- cpu`
#![expect(clippy::print_stdout, reason = "an example")]
#![expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "few tokens")]
#![expect(clippy::cast_possible_truncation, reason = "few tokens")]

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use kv::backend::AnyBackend;
use kv::tier::handoff::{ExportState, Handoff};
use kv::tier::{Identity, MemoryStore, ModelDigest, TierOptions, TieredCache};
use kv::{AttentionOptions, Axes, CacheSpec, Device, KvCache, SequenceId};
use kv::{StartOptions, StepInput, TensorView, TensorViewMut};

const SEQ: SequenceId = SequenceId(0);
/// How long the decode instance waits for blocks, by the handoff.
const LONG: Duration = Duration::from_secs(30);

/// Opens an instance: a cache of its own over the store that both share.
fn instance(
    device: &str,
    store: &Arc<MemoryStore>,
) -> Result<TieredCache<AnyBackend>, Box<dyn Error>> {
    // Tiers learn of full blocks by the changes that the cache keeps.
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(8).paged(4, 32).changes(64);
    let cache = KvCache::new(Device::open(device)?, spec.build()?)?;
    // Both must run the same weights: their digest is part of every name in the store.
    let identity = Identity::new(ModelDigest::of_bytes(b"weights"));
    // One block a chunk, because this model is tiny; the default is 1 MiB or 256 tokens.
    let options = TierOptions::new().with_store(Box::new(Arc::clone(store))).with_chunk_blocks(1);
    Ok(TieredCache::new(cache, identity, options)?)
}

/// Computes what is missing of a text. Returns the positions and the output of the last one.
fn forward(
    instance: &mut TieredCache<AnyBackend>,
    text: &[u32],
) -> Result<(Vec<u32>, Vec<f32>), Box<dyn Error>> {
    let mut step = instance.begin_step(&[StepInput::prompt(SEQ, text)])?;
    let positions = step.positions().to_vec();
    // Rows that follow from the token and its position.
    let rows = |factor: u32| -> Vec<f32> {
        let of = |position: u32| {
            let token = text.get(position as usize).map_or(0, |token| token * factor);
            (0..8).map(move |channel| ((token + channel * position) % 11) as f32 / 11.0)
        };
        positions.iter().copied().flat_map(of).collect()
    };
    let (q, k, v) = (rows(3), rows(5), rows(7));
    let mut out = vec![0.0_f32; v.len()];
    let dims = [positions.len() as u32, 1, 8];
    step.write(0, TensorView::host(&k, &dims), TensorView::host(&v, &dims), Axes::Thd)?;
    let to = TensorViewMut::host(&mut out, &dims);
    step.attend(0, TensorView::host(&q, &dims), to, &AttentionOptions::causal(0.35))?;
    step.commit()?;
    Ok((positions, out.split_off(out.len() - 8)))
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let store = Arc::new(MemoryStore::new(1 << 20)); // Redis, S3 or a folder between processes
    let (mut prefill, mut decode) = (instance(&device, &store)?, instance(&device, &store)?);
    let options = StartOptions::default();
    let prompt: Vec<u32> = (1..=24).collect();

    // The prefill instance computes the prompt and exports its 6 blocks. The handoff is a message
    // of 100 bytes, which can be sent before the blocks are written.
    prefill.cache_mut().start(SEQ, &prompt, options)?;
    let (positions, _) = forward(&mut prefill, &prompt)?;
    assert_eq!(positions.len(), 24);
    let export = prefill.export_prefill(SEQ, 0, LONG)?;
    let message = export.handoff.to_bytes();
    assert_eq!((message.len(), export.handoff.tokens()), (100, 24));
    while let Some(ExportState::OnTheWay { .. }) = prefill.export_state(export.id) {
        prefill.poll()?;
        std::thread::sleep(Duration::from_micros(100));
    }
    assert_eq!(prefill.export_state(export.id), Some(ExportState::Written));

    // The decode instance goes on with the token that was sampled from the prompt.
    let text = [&prompt[..], &[7]].concat();
    let handoff = Handoff::from_bytes(&message)?;
    let prefetch = decode.import_prefill(&handoff, &text, &options)?;
    while !decode.is_ready(prefetch) {
        decode.poll()?; // between the steps of its other sequences
        std::thread::sleep(Duration::from_micros(100));
    }
    let reused = decode.start(prefetch, SEQ, options)?;
    assert_eq!(reused, 24); // the whole prompt
    let (positions, here) = forward(&mut decode, &text)?;
    assert_eq!(positions, [24]);

    // The same step where the prompt was computed gives the same bits.
    let (positions, there) = forward(&mut prefill, &text)?;
    assert_eq!(positions, [24]);
    assert!(here.iter().any(|value| *value != 0.0));
    assert_eq!(here, there);

    // A prompt that the handoff is not about is refused: it is computed as any other.
    let other: Vec<u32> = (2..=30).collect();
    assert!(decode.import_prefill(&handoff, &other, &options).is_err());

    let read = decode.stats().stores.iter().map(|store| store.reads).sum::<u64>();
    println!("{device}: {reused} tokens handed over in {read} chunks, {} bytes", message.len());
    Ok(())
}
