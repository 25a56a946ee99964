//! Dot products of query rows with rows of K.
use half::bf16;

use super::*;
use kv_cpu_kernels::{Prefetch, QUERY_PAD, Qk, SCORE_PAD};

const SCORE_STRIDE: usize = 64;

/// Query rows, rows of K, and the expected products.
struct Queries<'k> {
    k: &'k Stored,
    values: Vec<f32>,
    words: Option<Vec<u32>>,
    stride: usize,
    /// By row, then by token: the product and its size.
    expected: Vec<Vec<(f64, f64)>>,
}

impl<'k> Queries<'k> {
    /// Rows of `f32`, or of bf16 for products of those.
    fn new(random: &mut Random, k: &'k Stored, is_bf16: bool) -> Self {
        let dim = k.layout.dim();
        let stride = dim.next_multiple_of(QUERY_PAD) + dim % 16 * 8;
        let mut values = vec![0.0; ROWS_MAX * stride];
        let mut words = vec![0; values.len() / 2];
        let mut expected = Vec::new();
        for (row, words) in values.chunks_mut(stride).zip(words.chunks_mut(stride / 2)) {
            for value in &mut row[..dim] {
                let x = random.unit();
                *value = if is_bf16 { bf16::from_f32(x).to_f32() } else { x };
            }
            if is_bf16 {
                let in_pairs = k.layout.encoding() == kv_cpu_kernels::Encoding::Bf16Pairs;
                Kernels::emulated().query_words(row, (dim, in_pairs), words);
            }
            expected.push(k.values.iter().map(|key| dot(&row[..dim], key)).collect());
        }
        Self { k, values, words: is_bf16.then_some(words), stride, expected }
    }

    /// Scores the last tokens by some rows.
    fn check(&self, kernels: Kernels, rows: usize, tokens: usize) {
        let runs = runs_of(self.k.last(tokens));
        let mut scores = vec![f32::NAN; rows * SCORE_STRIDE];
        kernels.qk(&mut Qk {
            rows,
            q: &self.values[..rows * self.stride],
            words: self.words.as_ref().map(|words| &words[..rows * self.stride / 2]),
            q_stride: self.stride,
            k: TileRows::new(&runs),
            scores: &mut scores,
            score_stride: SCORE_STRIDE,
            decoded: &mut vec![f32::NAN; kernels.decoded_len(&self.k.layout)],
            prefetch: &mut Prefetch::new(kernels.prefetch(), &runs, &runs),
        });
        let (scales, dim) = (self.k.scales(kernels, tokens), self.k.layout.dim());
        for (row, (scores, expected)) in scores.chunks(SCORE_STRIDE).zip(&self.expected).enumerate()
        {
            let expected = &expected[TOKENS_MAX - tokens..];
            for (token, (score, (product, size))) in scores.iter().zip(expected).enumerate() {
                let score = score * scales[token];
                assert!(
                    is_near(score, *product, (*size, dim)),
                    "{kernels:?} {:?}, dim {dim}, {rows} rows, {tokens} tokens, bf16 {}: score \
                     {row} {token} is {score}, not {product}",
                    self.k.layout.encoding(),
                    self.words.is_some(),
                );
            }
            let after = &scores[tokens + SCORE_PAD - 1..];
            assert!(after.iter().all(|score| score.is_nan()), "scores after the padding");
        }
    }
}

#[test]
fn scores_are_dot_products() {
    let mut random = Random::new(1);
    for kind in kinds() {
        for dim in DIMS {
            let k = Stored::new(&mut random, kind, dim, TOKENS_MAX);
            for is_bf16 in [false, true] {
                let queries = Queries::new(&mut random, &k, is_bf16);
                for kernels in all_kernels() {
                    if is_bf16 && !kernels.takes_words(k.layout.encoding()) {
                        continue;
                    }
                    for (rows, tokens) in ROWS.into_iter().flat_map(|r| TOKENS.map(|t| (r, t))) {
                        queries.check(kernels, rows, tokens);
                    }
                }
            }
        }
    }
}

#[test]
fn emulated_kernels_have_products_of_bf16() {
    let kernels = Kernels::emulated();
    let with_words = kinds().filter(|(format, in_pairs)| {
        let layout = RowLayout::of(*format, 64).unwrap();
        let layout = if *in_pairs { layout.in_pairs() } else { layout };
        kernels.takes_words(layout.encoding())
    });
    // Three scalings of each format of FP8, and bf16 in pairs.
    assert_eq!(with_words.count(), 7);
}

/// A NaN of K reaches the scores of its token alone.
#[test]
fn a_nan_reaches_its_token_alone() {
    const DIM: usize = 72;
    let q = vec![1.0; ROWS_MAX * 2 * QUERY_PAD];
    for name in ["f32", "f16", "bf16", "fp8-e4m3", "fp8-e5m2"] {
        let mut rows = vec![vec![0.5; DIM]; TOKENS_MAX];
        (rows[3][0], rows[16][40], rows[36][DIM - 1]) = (f32::NAN, f32::NAN, f32::NAN);
        let k = Stored::of(rows, (name.parse().unwrap(), false), 0);
        let broken = |token: usize| k.values[token].iter().any(|x| x.is_nan());
        assert!([3, 16, 36].into_iter().all(broken), "{name} has NaN");
        for kernels in all_kernels() {
            let mut scores = vec![0.0; ROWS_MAX * SCORE_STRIDE];
            kernels.qk(&mut Qk {
                rows: ROWS_MAX,
                q: &q,
                words: None,
                q_stride: 2 * QUERY_PAD,
                k: TileRows::of_run(&k.last(TOKENS_MAX)),
                scores: &mut scores,
                score_stride: SCORE_STRIDE,
                decoded: &mut vec![0.0; kernels.decoded_len(&k.layout)],
                prefetch: &mut Prefetch::none(),
            });
            for row in scores.chunks(SCORE_STRIDE) {
                for (token, score) in row[..TOKENS_MAX].iter().enumerate() {
                    assert_eq!(score.is_nan(), broken(token), "{kernels:?} {name} {token}");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "query rows lie inside their slice")]
fn query_rows_past_their_slice_are_refused() {
    let k = Stored::new(&mut Random::new(2), (KvFormat::F32, false), 8, 1);
    Kernels::emulated().qk(&mut Qk {
        rows: 2,
        q: &[0.0; 2 * QUERY_PAD - 1],
        words: None,
        q_stride: QUERY_PAD,
        k: TileRows::of_run(&k.last(1)),
        scores: &mut [0.0; 32],
        score_stride: 16,
        decoded: &mut [],
        prefetch: &mut Prefetch::none(),
    });
}

#[test]
#[should_panic(expected = "score rows lie inside their slice")]
fn a_run_whose_padding_exceeds_its_row_of_scores_is_refused() {
    let k = Stored::new(&mut Random::new(2), (KvFormat::F32, false), 8, 7);
    let k = k.last(7);
    Kernels::emulated().qk(&mut Qk {
        rows: 1,
        q: &[0.0; QUERY_PAD],
        words: None,
        q_stride: QUERY_PAD,
        k: TileRows::new(&runs_of(k)),
        scores: &mut [0.0; 16],
        score_stride: 16,
        decoded: &mut [],
        prefetch: &mut Prefetch::none(),
    });
}

/// Means of blocks, in f16, and tiles, in f32, are multiplied without memory for decoded rows.
#[test]
fn f32_and_f16_are_decoded_in_registers() {
    let decoded = |kernels: Kernels, name: &str| {
        kernels.decoded_len(&RowLayout::of(name.parse().unwrap(), 72).unwrap())
    };
    for kernels in all_kernels() {
        assert_eq!(["f32", "f16"].map(|name| decoded(kernels, name)), [0, 0], "{kernels:?}");
        // Sixteen rows of 72 values, each padded to a multiple of 32.
        assert_eq!(decoded(kernels, "l3"), 16 * 96, "{kernels:?}");
    }
}

#[test]
#[should_panic(expected = "there is memory for decoded rows")]
fn rows_that_exceed_the_memory_for_decoded_rows_are_refused() {
    let k = Stored::new(&mut Random::new(2), ("l3".parse().unwrap(), false), 64, 2);
    Kernels::emulated().qk(&mut Qk {
        rows: 1,
        q: &[0.0; QUERY_PAD],
        words: None,
        q_stride: QUERY_PAD,
        k: TileRows::of_run(&k.last(2)),
        scores: &mut [0.0; 16],
        score_stride: 16,
        decoded: &mut [0.0; 127],
        prefetch: &mut Prefetch::none(),
    });
}
