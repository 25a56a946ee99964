//! `LayerCache` against candle's own cache of the same signature.
#![expect(clippy::unwrap_used, reason = "tests")]
use candle_core::{DType, Device, Tensor};
use candle_nn::kv_cache::ConcatKvCache;
use kv_candle::LayerCache;
use kv_candle::kv::{CacheSpec, KvFormat};

fn layers(format: KvFormat) -> Vec<LayerCache> {
    let spec = CacheSpec::builder().layers(3).kv_heads(2).head_dims(16, 8).format(format);
    LayerCache::for_model(&Device::Cpu, spec.paged(4, 24).build().unwrap()).unwrap()
}

/// New rows: random numbers, laid out as most of candle's models have them.
fn rows(batch: usize, tokens: usize, dtype: DType) -> [Tensor; 2] {
    [16, 8].map(|dim| {
        let rows = Tensor::randn(0.0_f32, 1.0, (batch, tokens, 2, dim), &Device::Cpu).unwrap();
        rows.to_dtype(dtype).unwrap().transpose(1, 2).unwrap()
    })
}

#[track_caller]
fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f32) {
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()));
    assert!(got.is_contiguous());
    let [got, expected] = [got, expected].map(|rows| rows.to_dtype(DType::F32).unwrap());
    let worst = (got - expected).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
    assert!(worst.to_scalar::<f32>().unwrap() <= tolerance, "{worst}");
}

#[test]
fn all_rows_come_back_as_from_candles_own_cache() {
    for (format, dtype, tolerance) in [
        (KvFormat::F32, DType::F32, 0.0),
        (KvFormat::F16, DType::F16, 0.0),
        (KvFormat::Bf16, DType::BF16, 0.0),
        (KvFormat::Bf16, DType::F32, 2e-2),
        ("int8".parse().unwrap(), DType::F32, 5e-2),
    ] {
        let mut ours = layers(format);
        // The second batch is another one, after a reset.
        for batch in [3, 1] {
            let mut theirs: Vec<_> = (0..3).map(|_| ConcatKvCache::new(2)).collect();
            let mut len = 0;
            for tokens in [5, 1, 4, 1] {
                len += tokens;
                for (ours, theirs) in ours.iter_mut().zip(&mut theirs) {
                    let [k, v] = rows(batch, tokens, dtype);
                    let (got_k, got_v) = ours.append(&k, &v).unwrap();
                    let (k, v) =
                        theirs.append(&k.contiguous().unwrap(), &v.contiguous().unwrap()).unwrap();
                    assert_close(&got_k, &k, tolerance);
                    assert_close(&got_v, &v, tolerance);
                }
                assert!(ours.iter().all(|layer| layer.len() == len));
            }
            ours[1].reset().unwrap();
            assert!(ours.iter().all(LayerCache::is_empty));
            assert_eq!(ours[0].with_kv(|kv| kv.state().usage().blocks_used), 0);
        }
    }
}

/// A model that a server moves to a thread, and one whose layers are on two threads.
#[test]
fn layers_move_to_threads() {
    fn is_send<T: Send + 'static>() {}
    is_send::<LayerCache>();
    let layers = layers(KvFormat::F32);
    let pass = |layers: &mut [LayerCache], [k, v]: &[Tensor; 2]| {
        layers.iter_mut().map(|layer| layer.append(k, v).unwrap().0.dim(2).unwrap()).max()
    };
    let rows = rows(2, 3, DType::F32);
    let moved = rows.clone();
    let mut layers = std::thread::spawn(move || {
        let mut layers = layers;
        assert_eq!(pass(&mut layers, &moved), Some(3));
        layers
    })
    .join()
    .unwrap();
    assert_eq!(layers[0].len(), 3);
    let (first, rest) = layers.split_at_mut(1);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| pass(first, &rows));
        let rest = scope.spawn(|| pass(rest, &rows));
        assert_eq!((first.join().unwrap(), rest.join().unwrap()), (Some(6), Some(6)));
    });
    assert!(layers.iter().all(|layer| layer.len() == 6));
}

#[test]
fn a_pass_that_failed_half_way_is_forgotten() {
    let mut layers = layers(KvFormat::F32);
    let first = rows(1, 3, DType::F32);
    for layer in &mut layers {
        layer.append(&first[0], &first[1]).unwrap();
    }
    let lost = rows(1, 2, DType::F32);
    for layer in &mut layers[..2] {
        assert_eq!(layer.append(&lost[0], &lost[1]).unwrap().0.dims(), [1, 2, 5, 16]);
    }
    assert_eq!(layers[0].len(), 3, "the third layer never came");
    let next = rows(1, 1, DType::F32);
    for layer in &mut layers {
        let (k, _) = layer.append(&next[0], &next[1]).unwrap();
        let expected = Tensor::cat(&[&first[0], &next[0]], 2).unwrap();
        assert_close(&k, &expected.contiguous().unwrap(), 0.0);
    }
    assert_eq!(layers[0].len(), 4);
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut layers = layers(KvFormat::F32);
    let [k, v] = rows(2, 3, DType::F32);
    let mut refused = |k: &Tensor, v: &Tensor, words: &str| {
        let error = layers[0].append(k, v).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(&k, &v.to_dtype(DType::F16).unwrap(), "k is F32, v is F16");
    refused(&k, &k, "16");
    refused(&k.narrow(1, 0, 1).unwrap(), &v, "1");
    refused(&k.squeeze(0).unwrap().narrow(0, 0, 1).unwrap().squeeze(0).unwrap(), &v, "4");
    let [long_k, long_v] = rows(2, 60, DType::F32);
    refused(&long_k, &long_v, "blocks");
    let [other_k, _] = rows(1, 1, DType::F32);
    refused(&other_k, &k.narrow(0, 0, 1).unwrap(), "16");
    for layer in &mut layers {
        layer.append(&k, &v).unwrap();
    }
    // One layer has other tokens than the one before.
    layers[0].append(&k, &v).unwrap();
    let error = layers[1].append(&long_k, &long_v).unwrap_err().to_string();
    assert!(error.contains("60 tokens, other layers have 3"), "{error}");
    let [other_k, other_v] = rows(1, 1, DType::F32);
    let error = layers[0].append(&other_k, &other_v).unwrap_err().to_string();
    assert!(error.contains("reset it before another batch"), "{error}");
    assert_eq!(layers[0].len(), 3);
    layers[0].reset().unwrap();
    for layer in &mut layers {
        layer.append(&other_k, &other_v).unwrap();
    }
    assert_eq!(layers[2].len(), 1);
}
