//! The engine over the CPU backend, with a model whose next token depends on every earlier token,
//! read back from the cache: its text is right only if each token was added once, in order and at
//! its position, and if shared, copied and reused blocks are right.
#![forbid(unsafe_code)]
#![allow(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::indexing_slicing,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that panics fails, as it should"
)]
mod bad_output;
mod beams;
mod cancel;
mod choices;
mod clock;
mod drafts;
mod fair;
mod faults;
mod held;
mod hints;
mod random;
mod reuse;
mod search;
mod session;
mod states;
mod tiers;
mod windows;

use kv_core::backend::{Backend, NullBackend};
use kv_core::spec::{CacheSpecBuilder, PrefixReuse, PublishAt};
use kv_core::{
    AttentionOptions, Axes, CacheError, CacheSpec, KvCache, SequenceId, Step, TensorView,
    TensorViewMut,
};
use kv_cpu::{CpuBackend, CpuOptions};
use kv_engine::{
    Batch, BeamOptions, Chunk, Engine, EngineError, Event, Finish, Generated, Limits, Logits,
    Model, ModelError, Request, RequestError, RequestSize, Sampler, Shortage, Stats,
};

const LAYERS: u16 = 2;
const VOCAB: u32 = 50;
/// Also the head dim: a token's row holds it at its position.
const CONTEXT: u32 = 128;

/// Logits that follow a history.
type Rule = fn(&[u32]) -> Vec<f32>;

/// A model that reads the history of every token back from the cache and applies a rule.
struct Echo {
    rule: Rule,
    batches: Vec<Vec<Chunk>>,
    /// The window of the second layer; without one both layers have the whole history.
    window_left: Option<u32>,
}

impl Echo {
    fn new(rule: Rule) -> Self {
        Self { rule, batches: Vec::new(), window_left: None }
    }

    /// Makes a model whose next token is certain.
    fn certain() -> Self {
        Self::new(|history| certain(next(history)))
    }
}

/// The token that follows a history.
fn next(history: &[u32]) -> u32 {
    hash(history) % VOCAB
}

fn hash(history: &[u32]) -> u32 {
    history.iter().fold(17_u32, |hash, token| {
        hash.wrapping_mul(31).wrapping_add(*token).wrapping_mul(0x9E37_79B1).rotate_left(7)
    })
}

fn certain(token: u32) -> Vec<f32> {
    let mut row = vec![0.0; to_usize(VOCAB)];
    row[to_usize(token)] = 1.0;
    row
}

/// Logits of every token, from the whole history.
fn rough(history: &[u32]) -> Vec<f32> {
    let mut state = hash(history);
    (0..VOCAB)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from(u16::try_from(state >> 20).expect("12 bits")) / 1024.0
        })
        .collect()
}

impl<B: Backend> Model<B> for Echo {
    fn forward(&mut self, step: &mut Step<'_, B>, batch: &Batch) -> Result<Logits, ModelError> {
        self.batches.push(batch.chunks.clone());
        let positions = step.positions().to_vec();
        assert_eq!(positions.len(), batch.tokens.len());
        let width = to_usize(CONTEXT);
        let zeros = vec![0.0_f32; positions.len() * width];
        let mut v = zeros.clone();
        for (row, (token, position)) in batch.tokens.iter().zip(&positions).enumerate() {
            v[row * width + to_usize(*position)] =
                f32::from(u16::try_from(*token).expect("small") + 1);
        }
        let dims = [to_u32(positions.len()), 1, CONTEXT];
        let mut out = vec![zeros.clone(); usize::from(LAYERS)];
        for (layer, out) in (0..LAYERS).zip(&mut out) {
            let (k, v) = (TensorView::host(&zeros, &dims), TensorView::host(&v, &dims));
            step.write(layer, k, v, Axes::Thd)?;
            let (q, out) = (TensorView::host(&zeros, &dims), TensorViewMut::host(out, &dims));
            let options = AttentionOptions::causal(1.0);
            let options = match self.window_left.filter(|_| layer == 1) {
                Some(left) => options.with_window_left(left),
                None => options,
            };
            step.attend(layer, q, out, &options)?;
        }
        for (row, position) in positions.iter().enumerate() {
            let row = row * width..(row + 1) * width;
            check_window(&out[1][row.clone()], &out[0][row], *position, self.window_left);
        }
        // Every key has the same weight, so a channel is the value at its position over their
        // number.
        let history = |row: usize| -> Vec<u32> {
            let len = positions[row] + 1;
            let values = &out[0][row * width..][..to_usize(len)];
            let token =
                |value: &f32| (value * f32::from(u16::try_from(len).expect("small"))).round();
            #[expect(clippy::as_conversions, clippy::cast_sign_loss, reason = "small and whole")]
            #[expect(clippy::cast_possible_truncation, reason = "small and whole")]
            values.iter().map(|value| token(value) as u32 - 1).collect()
        };
        let mut end = 0;
        for chunk in &batch.chunks {
            end += to_usize(chunk.tokens);
            assert_eq!(history(end - 1).last(), batch.tokens.get(end - 1));
        }
        if !step.cache().state().spec().states().is_empty() {
            let before = |row: usize, first: usize| {
                let mut text = history(row);
                text.truncate(to_usize(positions[first]));
                text
            };
            states::advance(step, batch, &before)?;
        }
        let rows = batch.logit_rows().map(|row| (self.rule)(&history(to_usize(row))));
        Ok(Logits::new(rows.flatten().collect(), VOCAB))
    }
}

/// Checks that a layer with a window has the values of one without, those of the window alone.
fn check_window(of_window: &[f32], all: &[f32], position: u32, window_left: Option<u32>) {
    let first = position.saturating_sub(window_left.unwrap_or(u32::MAX));
    let sum = |out: &[f32], len: u32| -> Vec<f32> {
        out.iter()
            .map(|value| (value * f32::from(u16::try_from(len).expect("small"))).round())
            .collect()
    };
    let mut expected = sum(all, position + 1);
    expected[..to_usize(first)].fill(0.0);
    assert_eq!(sum(of_window, position + 1 - first), expected);
}

/// A model that writes zeros and returns zeros, for a device that stores nothing.
#[derive(Default)]
struct Blind {
    batches: Vec<Vec<Chunk>>,
}

impl Model<NullBackend> for Blind {
    fn forward(
        &mut self,
        step: &mut Step<'_, NullBackend>,
        batch: &Batch,
    ) -> Result<Logits, ModelError> {
        self.batches.push(batch.chunks.clone());
        write_zeros(step, batch)?;
        Ok(zeros(batch))
    }
}

fn write_zeros(step: &mut Step<'_, NullBackend>, batch: &Batch) -> Result<(), CacheError> {
    let rows = vec![0.0_f32; batch.tokens.len()];
    let dims = [to_u32(rows.len()), 1, 1];
    for layer in 0..LAYERS {
        let view = TensorView::host::<f32>(&rows, &dims);
        step.write(layer, view, view, Axes::Thd)?;
    }
    Ok(())
}

fn zeros(batch: &Batch) -> Logits {
    Logits::new(vec![0.0; to_usize(batch.num_logits() * VOCAB)], VOCAB)
}

fn to_usize(n: u32) -> usize {
    n.try_into().expect("small")
}

fn to_u32(n: usize) -> u32 {
    n.try_into().expect("small")
}

/// Numbers below `n`, by xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 % u64::from(n)).expect("small")
    }
}

fn prompts(count: u32) -> Vec<Vec<u32>> {
    (0..count).map(|i| (0..3 + 7 * (i % 4)).map(|j| (i * 13 + j * 5) % VOCAB).collect()).collect()
}

fn requests(prompts: &[Vec<u32>], max_new_tokens: u32) -> Vec<Request> {
    let request = |(index, prompt): (usize, &Vec<u32>)| Request {
        prompt: prompt.clone(),
        max_new_tokens,
        sampler: Sampler::new(0.0, 0, index),
        ..Request::new(Vec::new(), 0)
    };
    prompts.iter().enumerate().map(request).collect()
}

fn limits(max_batch: u32, max_step_tokens: u32) -> Limits {
    Limits { max_batch, max_step_tokens, vocab: Some(VOCAB), ..Limits::new(CONTEXT) }
}

/// Returns the expected text, from the rule alone.
fn expected(prompt: &[u32], new: usize) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for _ in 0..new {
        history.push(next(&history));
    }
    history.split_off(prompt.len())
}

fn cache(block_size: u32, num_blocks: u32) -> KvCache<CpuBackend> {
    cache_with(block_size, num_blocks, |spec| spec)
}

fn cache_with(
    block_size: u32,
    num_blocks: u32,
    change: impl FnOnce(CacheSpecBuilder) -> CacheSpecBuilder,
) -> KvCache<CpuBackend> {
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(CONTEXT);
    let spec = spec.max_seq_len(CONTEXT).publish_at(PublishAt::Begin).paged(block_size, num_blocks);
    KvCache::new(cpu(), change(spec).build().expect("spec")).expect("cache")
}

fn cpu() -> CpuBackend {
    CpuBackend::open(CpuOptions::default().with_threads(1)).expect("the CPU")
}

fn run(
    cache: KvCache<CpuBackend>,
    requests: Vec<Request>,
    limits: Limits,
) -> Result<(Vec<Generated>, Stats, Echo), EngineError> {
    run_rule(|history| certain(next(history)), cache, requests, limits)
}

fn run_rule(
    rule: Rule,
    cache: KvCache<CpuBackend>,
    requests: Vec<Request>,
    limits: Limits,
) -> Result<(Vec<Generated>, Stats, Echo), EngineError> {
    let mut model = Echo::new(rule);
    let (generated, stats) = Engine::new(cache, limits).run(&mut model, requests)?;
    Ok((generated, stats, model))
}

#[test]
fn every_pool_batch_and_chunk_gives_the_same_tokens() {
    let prompts = prompts(7);
    for (block_size, num_blocks) in [(1, 400), (1, 50), (4, 12), (4, 100), (16, 3), (128, 1)] {
        for max_batch in [1, 3, 16] {
            for max_step_tokens in [1, 5, 1000] {
                for (forget, reuse) in [
                    (false, PrefixReuse::Off),
                    (false, PrefixReuse::FullBlocks),
                    (false, PrefixReuse::Partial),
                    (true, PrefixReuse::Off),
                ] {
                    // Every token computes all before it again.
                    let new = if forget { 5 } else { 20 };
                    let limits = Limits { forget, ..limits(max_batch, max_step_tokens) };
                    let cache = cache_with(block_size, num_blocks, |spec| spec.prefix_reuse(reuse));
                    let (generated, stats, _) =
                        run(cache, requests(&prompts, new), limits).expect("runs");
                    assert_eq!(generated.len(), prompts.len());
                    for (generated, prompt) in generated.iter().zip(&prompts) {
                        assert_eq!(generated.tokens, expected(prompt, to_usize(new)));
                        assert_eq!(generated.finish, Finish::Length);
                    }
                    assert_eq!(stats.generated_tokens, 7 * to_usize(new));
                    assert!(stats.blocks_peak <= num_blocks);
                }
            }
        }
    }
}

#[test]
fn the_youngest_is_preempted_and_comes_back() {
    // Two sequences of 3 + 29 tokens need 8 blocks each at the end; there are 9.
    let prompts = vec![vec![1, 2, 3], vec![4, 5, 6]];
    let (generated, stats, model) =
        run(cache(4, 9), requests(&prompts, 29), limits(2, 1000)).expect("runs");
    for (generated, prompt) in generated.iter().zip(&prompts) {
        assert_eq!(generated.tokens, expected(prompt, 29));
    }
    assert_eq!(stats.preemptions, 1);
    let batches = &model.batches;
    let again = batches.iter().flatten().filter(|chunk| chunk.sequence == SequenceId(1));
    assert_eq!(again.filter(|chunk| chunk.tokens > 3).count(), 1, "one recomputation, at once");
}

#[test]
fn prefill_and_decode_share_steps_of_bounded_size() {
    let prompts = vec![vec![1; 3], vec![2; 40]];
    let (_, _, model) = run(cache(16, 8), requests(&prompts, 10), limits(2, 8)).expect("runs");
    let batches = &model.batches;
    let size = |batch: &Vec<Chunk>| batch.iter().map(|chunk| chunk.tokens).sum::<u32>();
    assert!(batches.iter().all(|batch| size(batch) <= 8));
    let mixed = batches.iter().filter(|batch| {
        batch.iter().any(|chunk| chunk.tokens == 1) && batch.iter().any(|chunk| chunk.tokens > 1)
    });
    assert!(mixed.count() >= 4, "the short prompt decodes while the long one is read");
}

#[test]
fn no_more_than_max_batch_run_at_once() {
    let prompts = prompts(6);
    let (_, _, model) = run(cache(4, 1000), requests(&prompts, 5), limits(2, 1000)).expect("runs");
    assert!(model.batches.iter().all(|batch| batch.len() <= 2));
}

#[test]
fn a_stop_token_ends_its_sequence_and_is_kept() {
    let prompts = prompts(3);
    let stop = expected(&prompts[1], 4)[3];
    let limits = Limits { stop: vec![stop], ..limits(3, 1000) };
    let (generated, ..) = run(cache(4, 100), requests(&prompts, 30), limits).expect("runs");
    for (generated, prompt) in generated.iter().zip(&prompts) {
        let all = expected(prompt, 30);
        let end = all.iter().position(|token| *token == stop).map_or(30, |at| at + 1);
        assert_eq!(generated.tokens, all[..end]);
        let finish = if end == 30 && all[29] != stop { Finish::Length } else { Finish::Stop };
        assert_eq!(generated.finish, finish);
    }
}

#[test]
fn the_context_is_the_end() {
    let prompts = vec![vec![3; 120]];
    let (generated, ..) =
        run(cache(16, 8), requests(&prompts, 100), limits(1, 1000)).expect("runs");
    assert_eq!(generated[0].tokens.len(), 8);
    assert_eq!(generated[0].finish, Finish::Context);
}

#[test]
fn requests_that_can_never_run_are_refused_first() {
    let refused = |prompts: &[Vec<u32>], new, num_blocks| {
        let result = run(cache(4, num_blocks), requests(prompts, new), limits(2, 1000));
        match result.err().expect("refused") {
            EngineError::Request(error) => error,
            other => panic!("{other}"),
        }
    };
    let error = refused(&[vec![1], vec![2; 128]], 1, 1000);
    assert!(matches!(error, RequestError::PromptTooLong { index: 1, tokens: 128, context: 128 }));
    let error = refused(&[vec![1], vec![2; 20]], 10, 7);
    let RequestError::DoesNotFit { index: 1, tokens: 29, shortage } = &error else {
        panic!("{error}");
    };
    assert_eq!(shortage.needed, 8);
    let advice = shortage.advice;
    assert_eq!((advice.chunk, advice.has_beams, advice.paged), (None, false, Some((4, 8))));
    assert!(error.to_string().ends_with("needs 8 blocks, the cache has 7"), "{error}");
    let error = refused(&[vec![]], 10, 7);
    assert!(matches!(error, RequestError::EmptyPrompt { index: 0 }));
    // It fits to the last block.
    run(cache(4, 8), requests(&[vec![2; 20]], 13), limits(2, 1000)).expect("32 cached tokens");
}

#[test]
fn sampling_does_not_depend_on_the_batch() {
    let sampled = |max_batch, num_blocks| {
        let mut requests = requests(&prompts(5), 20);
        for (index, request) in requests.iter_mut().enumerate() {
            request.sampler = Sampler::new(0.3, 42, index);
        }
        let (generated, stats, _) =
            run(cache(4, num_blocks), requests, limits(max_batch, 1000)).expect("runs");
        (generated.into_iter().map(|g| g.tokens).collect::<Vec<_>>(), stats.preemptions)
    };
    let (alone, _) = sampled(1, 1000);
    assert_eq!(sampled(5, 1000).0, alone);
    let (tight, preemptions) = sampled(5, 14);
    assert!(preemptions > 0);
    assert_eq!(tight, alone);
}
