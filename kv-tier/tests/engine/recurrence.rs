//! Recurrent states that follow from all words before them, so that a stale, foreign or shifted
//! state is found.
use kv_core::backend::Backend;
use kv_core::spec::{CacheSpecBuilder, StateFormat, StatesBuilder};
use kv_core::{CacheError, DType, Step, TensorView, TensorViewMut};

/// Integers below it are exact in f16.
const MODULUS: u32 = 2039;
/// Values of a state.
pub(crate) const WIDTH: usize = 3;
/// Layers that may have a state.
const LAYERS: [u16; 4] = [0, 1, 2, 3];

fn next(state: &mut [f32], word: u32, layer: u16) {
    for (value, at) in state.iter_mut().zip(0..) {
        #[expect(clippy::cast_sign_loss, reason = "none is negative")]
        let before = *value as u32;
        *value = ((before * 31 + word % MODULUS * 7 + at + u32::from(layer)) % MODULUS) as f32;
    }
}

/// Returns the state of a layer behind some words.
pub(crate) fn behind(words: &[u32], layer: u16) -> Vec<f32> {
    let mut state = vec![0.0; WIDTH];
    for word in words {
        next(&mut state, *word, layer);
    }
    state
}

/// Checks the states that an entry begins with, and writes those behind its new words. Without
/// words before, a state is zero: `start` are the words that stand for no token.
pub(crate) fn advance<B: Backend>(
    step: &mut Step<'_, B>,
    (start, before, new): (&[u32], &[u32], &[u32]),
) -> Result<(), CacheError> {
    let dims = [1, WIDTH as u32];
    for layer in LAYERS {
        if step.state_slots(layer).is_err() {
            continue;
        }
        let mut state = vec![0.0_f32; WIDTH];
        step.read_state(layer, 0, TensorViewMut::host(&mut state, &dims))?;
        let all = [start, before].concat();
        let zeros = vec![0.0; WIDTH];
        let expected = if before.is_empty() { zeros } else { behind(&all, layer) };
        assert_eq!(state, expected, "layer {layer} behind {} tokens", before.len());
        let state = behind(&[&all[..], new].concat(), layer);
        step.write_state(layer, 0, TensorView::host(&state, &dims))?;
    }
    Ok(())
}

/// Adds states of the layers given, one group each, to a spec.
pub(crate) fn with_states(
    spec: CacheSpecBuilder,
    layers: &[u16],
    (snapshots, grid): (u32, u32),
) -> CacheSpecBuilder {
    let states = |of: StatesBuilder| {
        let of = of.part([WIDTH as u32], DType::F32).slots(12);
        of.snapshots(snapshots, StateFormat::F16).grid(grid)
    };
    layers.iter().fold(spec, |spec, layer| spec.states([*layer], states))
}
