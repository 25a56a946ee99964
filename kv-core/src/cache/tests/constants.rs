//! Calibrated caches.
use super::*;
use crate::calibration::{Calibration, CalibrationError, LayerCalibration, PlaneCalibration};
use crate::spec::Transform;
use crate::{KvFormat, ScaleGroup, Scaling};

const INT8: KvFormat = KvFormat::Int8(Scaling::Row);
const L4: KvFormat = KvFormat::L4(ScaleGroup::Row);

fn spec(format: KvFormat) -> CacheSpec {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(4).format(format).paged(4, 4);
    spec.build().unwrap()
}

fn calibration(mean: f32) -> Calibration {
    let k = PlaneCalibration { scales: vec![0.5], mean: vec![mean; 4], ..Default::default() };
    let v = PlaneCalibration { scales: vec![0.25], ..Default::default() };
    Calibration::new(vec![LayerCalibration { k, v }; 2])
}

#[test]
fn constants_are_checked_before_anything_is_allocated() {
    let fp8 = KvFormat::Fp8E4m3(Scaling::Tensor);
    let backend = Arc::new(NullBackend::new());
    let open = |spec, given: Option<Calibration>| {
        KvCache::builder(Arc::clone(&backend), spec).calibration(given).build()
    };
    let missing = open(spec(fp8), None).unwrap_err();
    assert!(matches!(missing, CacheError::Calibration(CalibrationError::MissingScale { .. })));
    let short = Calibration::new(calibration(0.0).layers()[..1].to_vec());
    let short = open(spec(fp8), Some(short)).unwrap_err();
    assert!(matches!(short, CacheError::Calibration(CalibrationError::Layers { .. })), "{short}");
    let nan = open(spec(INT8), Some(calibration(f32::NAN))).unwrap_err();
    assert!(matches!(nan, CacheError::Calibration(CalibrationError::Value { .. })), "{nan}");
    assert_eq!(backend.control().recorded(), 0, "nothing was allocated");
    open(spec(fp8), Some(calibration(0.0))).unwrap();
}

/// Scales that a format needs come with the cache, whatever queue it has, and are uploaded on that
/// queue.
#[test]
fn a_cache_on_the_queue_of_its_caller_takes_constants() {
    let fp8 = spec(KvFormat::Fp8E4m3(Scaling::Tensor));
    let (device, other) = (NullBackend::new(), NullBackend::new());
    let queue = || device.queue().unwrap();
    let control = other.control();
    let backend = Arc::new(other);
    let builder = || KvCache::builder(Arc::clone(&backend), fp8.clone()).queue(queue());
    let missing = builder().build().unwrap_err();
    assert!(matches!(missing, CacheError::Calibration(CalibrationError::MissingScale { .. })));
    let given = || calibration(0.0);
    let short = builder().calibration(Calibration::new(Vec::new())).build().unwrap_err();
    assert!(matches!(short, CacheError::Calibration(CalibrationError::Layers { .. })), "{short}");
    assert_eq!((control.recorded(), device.control().recorded()), (0, 0));
    let cache = builder().calibration(given()).build().unwrap();
    // K and V of two layers: planes and constants of the backend, uploads of the queue.
    assert_eq!((control.recorded(), device.control().recorded()), (8, 4));
    let of_its_own = KvCache::builder(NullBackend::new(), fp8.clone()).calibration(given()).build();
    let of_its_own = of_its_own.unwrap();
    assert_eq!(cache.state().encoding_key(), of_its_own.state().encoding_key());
}

#[test]
fn the_encoding_key_distinguishes_caches() {
    let key = |spec: &CacheSpec, given: Option<Calibration>| {
        let backend = NullBackend::new();
        let cache = KvCache::builder(backend, spec.clone()).calibration(given).build().unwrap();
        cache.state().encoding_key()
    };
    let off = CacheSpec::builder().layers(2).kv_heads(1).head_dim(4).format(INT8).paged(4, 4);
    let off = off.transform(Transform::Off).build().unwrap();
    let keys = [
        key(&spec(INT8), None),
        key(&spec(INT8), Some(calibration(1.0))),
        key(&spec(INT8), Some(calibration(2.0))),
        key(&off, None),
        key(&spec(L4), None),
        key(&spec(KvFormat::F16), None),
    ];
    for (i, a) in keys.iter().enumerate() {
        for b in &keys[..i] {
            assert_ne!(a, b);
        }
    }
    assert_eq!(key(&spec(INT8), Some(calibration(1.0))), keys[1]);
    // Constants that a plane does not use do not change the key.
    assert_eq!(key(&off, Some(calibration(1.0))), keys[3]);
}

#[test]
fn a_failure_at_any_operation_leaves_constants_as_they_were() {
    let mut cache = KvCache::new(NullBackend::new(), spec(INT8)).unwrap();
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 6)]).unwrap();
    let (key, before) = (cache.state().encoding_key(), books(cache.state()));
    for operation in 0.. {
        cache.backend().control().fail_after(operation);
        match cache.recalibrate(calibration(1.0)) {
            Ok(()) => {
                assert!(operation > 16, "{operation} operations");
                break;
            }
            Err(CacheError::Device(_)) => assert_eq!(cache.state().encoding_key(), key),
            Err(other) => panic!("{other}"),
        }
        assert_eq!(books(cache.state()), before);
        assert!(cache.unrestored.is_empty(), "the device works again");
    }
    assert_ne!(cache.state().encoding_key(), key);
}

#[test]
fn constants_are_exchanged_whole_or_not_at_all() {
    let mut cache = KvCache::new(NullBackend::new(), spec(INT8)).unwrap();
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 3)]).unwrap();
    let key = cache.state().encoding_key();
    let refused = cache.recalibrate(Calibration::new(Vec::new())).unwrap_err();
    assert!(matches!(refused, CacheError::Calibration(_)), "{refused}");
    cache.backend().control().fail_after(0);
    let failed = cache.recalibrate(calibration(1.0)).unwrap_err();
    assert!(matches!(failed, CacheError::Device(_)), "{failed}");
    assert_eq!(cache.state().encoding_key(), key);
    cache.recalibrate(calibration(1.0)).unwrap();
    let made_so =
        KvCache::builder(NullBackend::new(), spec(INT8)).calibration(calibration(1.0)).build();
    assert_eq!(cache.state().encoding_key(), made_so.unwrap().state().encoding_key());
    assert_eq!(cache.state().seq_len(SEQ[0]), Some(3));
}
