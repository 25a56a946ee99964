//! Files round-trip, malformed ones are refused, and no input makes reading panic.
use kv_core::calibration::{CalibrationError, PlaneCalibration};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::*;

const SHAPE: LayerShape = LayerShape { num_kv_heads: 2, head_dim_k: 3, head_dim_v: 2 };

/// Returns two layers: one with all possible lists, one with as few as possible.
fn example() -> (Calibration, Metadata) {
    let all = LayerCalibration {
        k: PlaneCalibration {
            scales: vec![0.25, 0.5],
            amax: vec![0.0, 7.5],
            amax_transformed: vec![3.0, 4.0],
            mean: vec![-1.0, 0.0, 1e-30, f32::MAX, 5.5, -0.0],
            balance: vec![1.0, 0.0625, 16.0, 1.5, 0.3, 2.0],
        },
        v: PlaneCalibration {
            scales: vec![0.125],
            amax: vec![1.0, 2.0],
            amax_transformed: vec![2.0, 1.0],
            ..PlaneCalibration::default()
        },
    };
    let few = LayerCalibration {
        v: PlaneCalibration { amax: vec![1.0, 2.0], ..PlaneCalibration::default() },
        ..LayerCalibration::default()
    };
    let model = "Llama \"quoted\"\n\u{1f999} 0123abcd".to_owned();
    let metadata = Metadata { model, tokens: 512, layers: vec![SHAPE; 2] };
    (Calibration::new(vec![all, few]), metadata)
}

fn example_file() -> Vec<u8> {
    let (calibration, metadata) = example();
    write(&calibration, &metadata).unwrap()
}

/// Returns a file with these header bytes, valid or not, before the data of the example.
fn with_header(header: &[u8]) -> Vec<u8> {
    let (_, data) = parts();
    [u64::try_from(header.len()).unwrap().to_le_bytes().as_slice(), header, &data].concat()
}

/// Returns the header and the data of the example.
fn parts() -> (Value, Vec<u8>) {
    let file = example_file();
    let (length, rest) = file.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).unwrap());
    assert_eq!(header.len() % 8, 0);
    (serde_json::from_slice(header).unwrap(), data.to_vec())
}

/// Returns the error of the example's file with a changed header.
fn refused(change: impl FnOnce(&mut Value)) -> FileError {
    let (mut header, _) = parts();
    change(&mut header);
    read(&with_header(header.to_string().as_bytes())).unwrap_err()
}

#[test]
fn files_round_trip_and_are_reproducible() {
    let (calibration, metadata) = example();
    let file = example_file();
    assert_eq!(read(&file).unwrap(), (calibration, metadata));
    for _ in 0..8 {
        assert_eq!(example_file(), file);
    }
}

#[test]
fn the_safetensors_crate_reads_what_is_written() {
    let file = example_file();
    let read = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(read.len(), 9);
    let mean = read.tensor("layers.0.k.mean").unwrap();
    assert_eq!((mean.shape(), mean.dtype()), ([2, 3].as_slice(), safetensors::Dtype::F32));
    assert_eq!(mean.data()[..4], (-1.0_f32).to_le_bytes());
    assert_eq!(read.tensor("layers.0.v.scales").unwrap().shape(), [1]);
    assert_eq!(read.tensor("layers.1.v.amax").unwrap().shape(), [2]);
}

#[test]
fn a_calibrators_result_round_trips() {
    let shapes = [SHAPE, LayerShape { num_kv_heads: 1, ..SHAPE }];
    let mut calibrator = Calibrator::with_layers(shapes).unwrap().skip_first(0);
    let rows: Vec<f32> = (0_u8..120).map(|i| f32::from(i % 17) - 8.0).collect();
    calibrator.observe(0, 0, &rows, &rows[..80], &rows, 2).unwrap();
    calibrator.observe(1, 0, &rows, &rows[..80], &rows, 1).unwrap();
    let metadata = Metadata::of(&calibrator, "m");
    assert_eq!((metadata.tokens, metadata.layers.as_slice()), (20, shapes.as_slice()));
    let calibration = calibrator.finish().unwrap();
    let file = write(&calibration, &metadata).unwrap();
    assert_eq!(read(&file).unwrap(), (calibration, metadata));
    let (_, header) = SafeTensors::read_metadata(&file).unwrap();
    let strings = header.metadata().clone().unwrap();
    assert_eq!((strings["num_kv_heads"].as_str(), strings["head_dim_k"].as_str()), ("2,1", "3"));
}

#[test]
fn a_file_of_another_model_is_refused_by_name() {
    let (_, metadata) = read(&example_file()).unwrap();
    metadata.check_model(&metadata.model).unwrap();
    let refused = metadata.check_model("SmolLM2").unwrap_err();
    assert!(matches!(refused, FileError::OtherModel { .. }));
    let text = refused.to_string();
    assert!(text.contains("Llama") && text.contains("SmolLM2"), "{text}");
}

#[test]
fn constants_that_a_cache_refuses_are_not_written() {
    let (calibration, metadata) = example();
    let refuse = |calibration: &Calibration, layers: Vec<LayerShape>| {
        let metadata = Metadata { layers, ..metadata.clone() };
        write(calibration, &metadata).unwrap_err()
    };
    let layers = refuse(&calibration, vec![SHAPE]);
    assert_eq!(layers, FileError::NumLayers { expected: 1, got: 2 });
    let none = refuse(&Calibration::default(), Vec::new());
    assert_eq!(none, FileError::MissingLayer { layer: LayerId(0) });
    let empty =
        Calibration::new(vec![calibration.layers()[0].clone(), LayerCalibration::default()]);
    let empty = refuse(&empty, vec![SHAPE; 2]);
    assert_eq!(empty, FileError::MissingLayer { layer: LayerId(1) });
    let zero = LayerShape { head_dim_v: 0, ..SHAPE };
    let shape = refuse(&calibration, vec![SHAPE, zero]);
    assert_eq!(shape, FileError::LayerShape { layer: LayerId(1), shape: zero });
    let wide = refuse(&calibration, vec![LayerShape { head_dim_k: 4, ..SHAPE }; 2]);
    assert!(matches!(wide, FileError::Calibration(CalibrationError::Shape { .. })), "{wide}");
    let one = LayerCalibration { v: calibration.layers()[1].v.clone(), ..Default::default() };
    let many = Calibration::new(vec![one; 65537]);
    let many = refuse(&many, vec![SHAPE; 65537]);
    assert_eq!(many, FileError::NumLayers { expected: 65536, got: 65537 });

    let spoils: [fn(&mut LayerCalibration); 5] = [
        |layer| layer.k.mean[0] = f32::NAN,
        |layer| layer.k.balance[5] = 0.0,
        |layer| layer.v.amax[0] = -1.0,
        |layer| layer.k.scales[1] = f32::INFINITY,
        |layer| layer.v.mean = vec![0.0; 4],
    ];
    for spoil in spoils {
        let mut layers = calibration.layers().to_vec();
        spoil(&mut layers[0]);
        let refused = refuse(&Calibration::new(layers), vec![SHAPE; 2]);
        assert!(matches!(refused, FileError::Calibration(_)), "{refused}");
    }
}

#[test]
fn invalid_containers_are_refused() {
    let file = example_file();
    for end in [0, 7] {
        let got = read(&file[..end]).unwrap_err();
        assert_eq!(got, FileError::Truncated { expected: 8, got: end });
    }
    assert!(matches!(read(&file[..100]).unwrap_err(), FileError::Truncated { got: 100, .. }));
    let huge = [u64::MAX.to_le_bytes().as_slice(), b"{}"].concat();
    assert_eq!(read(&huge).unwrap_err(), FileError::Truncated { expected: u64::MAX, got: 10 });
    for end in [1, 4] {
        let cut = read(&file[..file.len() - end]).unwrap_err();
        assert!(matches!(cut, FileError::DataLength { .. }), "{cut}");
    }
    let longer = read(&[file.as_slice(), &[0]].concat()).unwrap_err();
    assert!(matches!(longer, FileError::DataLength { .. }), "{longer}");
    for header in [b"".as_slice(), b"[]", b"{\"a\":1}", b"\xff\xfe", b"{"] {
        let refused = read(&with_header(header)).unwrap_err();
        assert!(matches!(refused, FileError::Header(_)), "{refused}");
    }
}

#[test]
fn sizes_that_add_up_past_the_address_space_are_refused() {
    // Eight tensors of 2^61 - 1 bytes: the sum of their end and the header's length overflows.
    let size = (1_u64 << 61) - 1;
    let tensors = (0..8).map(|i| {
        let offsets = [i * size, (i + 1) * size];
        (format!("t{i}"), json!({ "dtype": "U8", "shape": [size], "data_offsets": offsets }))
    });
    let header = Value::Object(tensors.collect()).to_string();
    let refused = read(&with_header(header.as_bytes())).unwrap_err();
    assert!(matches!(refused, FileError::DataLength { .. }), "{refused}");
    let shape = refused_shape(&[usize::MAX, usize::MAX]);
    assert!(matches!(shape, FileError::Header(_)), "{shape}");
}

fn refused_shape(shape: &[usize]) -> FileError {
    refused(|header| header["layers.0.k.mean"]["shape"] = json!(shape))
}

#[test]
fn missing_and_invalid_metadata_are_refused() {
    for key in ["kv_calibration", "model", "tokens", "num_layers", "num_kv_heads", "head_dim_v"] {
        let missing = refused(|header| {
            header["__metadata__"].as_object_mut().unwrap().remove(key).unwrap();
        });
        assert!(matches!(missing, FileError::MissingKey { key: found } if found == key));
    }
    let other = refused(|header| {
        header.as_object_mut().unwrap().remove("__metadata__").unwrap();
    });
    assert_eq!(other, FileError::MissingKey { key: "kv_calibration" });
    let version = refused(|header| header["__metadata__"]["kv_calibration"] = json!("2"));
    assert_eq!(version, FileError::Version { got: "2".to_owned(), known: "1" });
    for (key, bad) in [
        ("num_layers", vec!["", "0", "-1", "+2", "65537", "4294967296", "two", "2.0", " 2"]),
        ("tokens", vec!["", "-1", "1e3", "4294967296"]),
        ("num_kv_heads", vec!["", "0", "2,", "2,2,2", "2,0", "2 2", "99999999999"]),
        ("head_dim_k", vec!["3,3,3", "0x3"]),
    ] {
        for text in bad {
            let got = refused(|header| header["__metadata__"][key] = json!(text));
            let FileError::Value { key: found, value, .. } = got else {
                panic!("{key} = {text:?}: {got}");
            };
            assert_eq!((found, value.as_str()), (key, text));
        }
    }
    let (mut header, _) = parts();
    header["__metadata__"]["made by"] = json!("somebody");
    header["__metadata__"]["num_kv_heads"] = json!("2,2");
    assert_eq!(read(&with_header(header.to_string().as_bytes())).unwrap(), example());
}

#[test]
fn counts_that_disagree_with_the_data_are_refused() {
    let more = refused(|header| header["__metadata__"]["num_layers"] = json!("65536"));
    assert_eq!(more, FileError::MissingLayer { layer: LayerId(2) });
    let fewer = refused(|header| header["__metadata__"]["num_layers"] = json!("1"));
    assert_eq!(fewer, FileError::UnknownTensor { name: "layers.1.v.amax".to_owned() });
    let heads = refused(|header| header["__metadata__"]["num_kv_heads"] = json!("4294967295"));
    assert!(matches!(heads, FileError::Shape { .. }), "{heads}");
    let dims = refused(|header| header["__metadata__"]["head_dim_k"] = json!("4294967295"));
    assert!(matches!(dims, FileError::Shape { .. }), "{dims}");
    // No tensor and no plane has this axis.
    let dims = refused(|header| header["__metadata__"]["head_dim_v"] = json!("4294967295"));
    assert!(matches!(dims, FileError::LayerShape { .. }), "{dims}");
}

#[test]
fn tensors_must_be_those_of_a_calibration() {
    for name in [
        "layers.0.k.mode",
        "layers.0.v.mean",
        "layers.0.v.balance",
        "layers.00.k.mean",
        "layers.+0.k.mean",
        "layers.65536.k.mean",
        "layers.2.k.mean",
        "layers.0.q.mean",
        "layers.0.k.mean.x",
        "layer.0.k.mean",
        "layers.0.k",
        "",
    ] {
        let unknown = refused(|header| {
            let header = header.as_object_mut().unwrap();
            let tensor = header.remove("layers.0.k.mean").unwrap();
            header.insert(name.to_owned(), tensor);
        });
        assert_eq!(unknown, FileError::UnknownTensor { name: name.to_owned() });
    }
    let dtype = refused(|header| header["layers.0.k.mean"]["dtype"] = json!("I32"));
    let name = "layers.0.k.mean".to_owned();
    assert_eq!(dtype, FileError::Dtype { name: name.clone(), got: "I32".to_owned() });
    for shape in [vec![6], vec![3, 2], vec![1, 2, 3], vec![2, 3, 1]] {
        let got = refused_shape(&shape);
        let expected = FileError::Shape { name: name.clone(), expected: vec![2, 3], got: shape };
        assert_eq!(got, expected);
    }
    let sizes = refused_shape(&[2, 4]);
    assert!(matches!(sizes, FileError::Header(_)), "{sizes}");
}

#[test]
fn numbers_that_a_cache_refuses_are_refused() {
    let (header, data) = parts();
    let number = |name: &str, bytes: [u8; 4]| {
        let begin = header[name]["data_offsets"][0].as_u64().unwrap();
        let begin = usize::try_from(begin).unwrap() + example_file().len() - data.len();
        let mut file = example_file();
        file[begin..begin + 4].copy_from_slice(&bytes);
        read(&file)
    };
    for (name, value) in [
        ("layers.0.k.mean", f32::NAN),
        ("layers.0.k.balance", -1.0),
        ("layers.0.k.balance", 1e-45),
        ("layers.0.v.scales", 0.0),
        ("layers.1.v.amax", f32::INFINITY),
    ] {
        let refused = number(name, value.to_le_bytes()).unwrap_err();
        let FileError::Calibration(CalibrationError::Value { .. }) = refused else {
            panic!("{name} = {value}: {refused}");
        };
    }
    assert!(number("layers.1.v.amax", 0.5_f32.to_le_bytes()).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]
    #[test]
    fn no_bytes_make_it_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        digits in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 0..4),
        end in any::<prop::sample::Index>(),
        cut in prop::bool::weighted(0.2),
    ) {
        let mut file = example_file();
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        // Digits of the header, which decide about lengths.
        let places: Vec<_> = (8..file.len()).filter(|at| file[*at].is_ascii_digit()).collect();
        for (at, digit) in digits {
            file[places[at.index(places.len())]] = digit;
        }
        if cut {
            file.truncate(end.index(file.len()));
        }
        // What was read can be written and is equal when read again.
        if let Ok((calibration, metadata)) = read(&file) {
            let again = write(&calibration, &metadata).unwrap();
            prop_assert_eq!(read(&again).unwrap(), (calibration, metadata));
        }
    }
}
