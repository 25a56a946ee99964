//! Logits of the example and of candle-transformers.
use std::sync::LazyLock;

use kv_candle::kv::KvFormat;

use crate::models::{self, Model};
use crate::run::{Logits, Ported, apart, as_candle, largest};

const PROMPT: usize = 17;
const DECODED: usize = 32;

/// Returns how far the logits of the example may be from candle's, relative to the largest one.
///
/// Both round to f32, at other places. The error of candle's own logits is that of a plain
/// computation: it is measured against f64, as the largest over all logits of some texts, so that
/// no lucky one decides. The example may have twice that error, so it differs from candle by three
/// times as much at most.
pub(crate) fn tolerance() -> f64 {
    static PLAIN_ERROR: LazyLock<f64> = LazyLock::new(|| plain_error(&models::llama()));
    3.0 * *PLAIN_ERROR
}

/// Returns the error of candle's logits, relative to the largest one.
fn plain_error(model: &Model) -> f64 {
    let error = |seed| {
        let text = models::text(seed, PROMPT + DECODED);
        let exact = (model.exact)(&text).split_off(PROMPT - 1);
        let plain = as_candle((model.theirs)(), &text, PROMPT);
        apart(&plain, &exact) / largest(&exact)
    };
    let worst = (1..=3).map(error).fold(0.0, f64::max);
    assert!(worst > 1e-8 && worst < 1e-5, "{worst} is no rounding of f32");
    worst
}

#[track_caller]
#[expect(clippy::print_stdout, reason = "a failing test shows it")]
pub(crate) fn assert_close(what: &str, got: &[Logits], expected: &[Logits], tolerance: f64) {
    let (apart, most) = (apart(got, expected), largest(expected));
    println!("{what}: {:.1e} of the largest logit apart, {tolerance:.1e} allowed", apart / most);
    assert!(apart <= tolerance * most, "{what}: {apart} apart, the largest is {most}");
}

#[test]
fn prefill_and_decode_are_those_of_candle() {
    let model = models::llama();
    let tolerance = tolerance();
    let text = models::text(1, PROMPT + DECODED);
    let expected = as_candle((model.theirs)(), &text, PROMPT);
    let mut ported = Ported::new(&model, KvFormat::F32, 16);
    let mut got = vec![ported.one(0, &text[..PROMPT])];
    got.extend(text[PROMPT..].iter().map(|token| ported.one(0, &[*token])));
    assert_close("f32", &got, &expected, tolerance);
    let exact = (model.exact)(&text).split_off(PROMPT - 1);
    assert_close("f64", &got, &exact, tolerance * 2.0 / 3.0);

    // The test sees a key: without the first token the last logits are others.
    let without = Ported::new(&model, KvFormat::F32, 16).one(0, &text[1..]);
    let differs = apart(&[without], &expected[DECODED..]) / largest(&expected);
    assert!(differs > 100.0 * tolerance, "{differs}");
}

/// Four sequences of other lengths, of which one comes late, against each alone in candle.
#[test]
fn a_ragged_batch_is_each_sequence_alone_in_candle() {
    let model = models::llama();
    let tolerance = tolerance();
    let prompts = [9, 1, 30, 14];
    let texts: Vec<_> = (0..).zip(prompts).map(|(i, n)| models::text(i, n + 8)).collect();
    let mut ported = Ported::new(&model, KvFormat::F32, 64);
    let mut got = vec![Vec::new(); 4];
    for round in 0_usize..10 {
        let mut new: Vec<(u64, &[u32])> = Vec::new();
        for (at, (text, prompt)) in (0..).zip(texts.iter().zip(prompts)) {
            // The last one comes in the third round; the others have left by the end.
            let begin = if at == 3 { 2 } else { 0 };
            match round.checked_sub(begin) {
                Some(0) => new.push((at, &text[..prompt])),
                Some(more @ 1..8) => new.push((at, &text[prompt + more - 1..][..1])),
                _ => {}
            }
        }
        for (logits, (at, _)) in ported.step(&new).into_iter().zip(&new) {
            got[usize::try_from(*at).unwrap()].push(logits);
        }
    }
    for ((got, text), prompt) in got.iter().zip(&texts).zip(prompts) {
        let expected = as_candle((model.theirs)(), &text[..prompt + 7], prompt);
        let what = format!("{prompt} tokens");
        assert_close(&what, got, &expected, tolerance);
    }
}
