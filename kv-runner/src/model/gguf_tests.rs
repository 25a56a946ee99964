//! GGUF files of hybrid models, with the names and values of llama.cpp's converter, against logits
//! of transformers.
mod converter;
mod qwen;
mod refusals;

use std::fs::File;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use kv::{SequenceId, StartOptions};

use super::Decoder;
use super::recorded::{Recorded, recorded};
use super::recorded_tests::{cache, check, read, text};

/// A recorded model as the contents of a GGUF file.
struct Contents {
    architecture: &'static str,
    keys: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
    /// Whether elements of matrices are rounded.
    is_quantised: bool,
}

/// Returns the type of rounded elements.
fn quantised(shape: &[usize]) -> GgmlDType {
    match shape {
        [_] => GgmlDType::F32,
        [.., width] if width.is_multiple_of(32) => GgmlDType::Q8_0,
        _ => GgmlDType::F16,
    }
}

/// Returns the names of recorded models, and their architectures in GGUF files.
const CASES: [(&str, &str); 13] = [
    ("lfm2", "lfm2"),
    ("lfm2-options", "lfm2"),
    ("granitemoehybrid", "granitehybrid"),
    ("granitemoehybrid-options", "granitehybrid"),
    ("granitemoehybrid-experts", "granitehybrid"),
    ("qwen3_5_text", "qwen35"),
    ("qwen3_5_text-options", "qwen35"),
    ("qwen3_5", "qwen35"),
    ("qwen3_next-dense", "qwen3next"),
    ("qwen3_next", "qwen3next"),
    ("qwen3_next-experts", "qwen3next"),
    // The same computation as in a mixture of Qwen3.5, with other matrices.
    ("qwen3_next", "qwen35moe"),
    ("qwen3_next-experts", "qwen35moe"),
];

impl Contents {
    fn of(name: &str, architecture: &'static str) -> (Recorded, Self) {
        let case = recorded().into_iter().find(|case| case.name == name).expect("recorded");
        let contents = match architecture {
            "lfm2" | "granitehybrid" => converter::contents(&case, architecture),
            _ => qwen::contents(&case, architecture),
        };
        (case, contents)
    }

    fn put(&mut self, key: &str, value: Value) {
        self.set(key, Some(value));
    }

    fn set(&mut self, key: &str, value: Option<Value>) {
        let key = format!("{}.{key}", self.architecture);
        self.keys.retain(|(known, _)| *known != key);
        self.keys.extend(value.map(|value| (key, value)));
    }

    fn tensor(&mut self, name: &str) -> &mut (String, Vec<usize>, Vec<f32>) {
        self.tensors.iter_mut().find(|(known, ..)| known == name).expect(name)
    }

    fn remove(&mut self, name: &str) -> Option<(String, Vec<usize>, Vec<f32>)> {
        let at = self.tensors.iter().position(|(known, ..)| known == name)?;
        Some(self.tensors.remove(at))
    }

    fn write(&self, path: &Path) {
        let quantised = self.tensors.iter().map(|(name, shape, values)| {
            let values = Tensor::from_slice(values, shape.as_slice(), &Device::Cpu);
            let values = values.expect("a tensor");
            let element = if self.is_quantised { quantised(shape) } else { GgmlDType::F32 };
            (name.as_str(), QTensor::quantize(&values, element).expect("a tensor"))
        });
        let quantised: Vec<_> = quantised.collect();
        let tensors: Vec<_> = quantised.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let keys: Vec<_> = self.keys.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let mut file = File::create(path).expect("a file");
        gguf_file::write(&mut file, &keys, &tensors).expect("a GGUF file");
    }

    /// Writes a file and reads the model from it.
    fn decoder(&self) -> Result<Decoder, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        self.write(&path);
        Decoder::read(&path).map_err(|error| {
            let causes = std::iter::successors(std::error::Error::source(&error), |of| of.source());
            causes.fold(error.to_string(), |all, cause| format!("{all}: {cause}"))
        })
    }
}

/// Checks the logits of a recorded text against those of transformers.
fn check_text(case: &Recorded, contents: &Contents) {
    let architecture = contents.architecture;
    let model = contents.decoder().unwrap_or_else(|error| panic!("{}: {error}", case.name));
    let ids = text(case);
    for chunk in [ids.len(), 7] {
        let mut cache = cache(&model);
        let id = SequenceId(1);
        cache.start(id, &[], StartOptions::default()).expect("starts");
        for (first, tokens) in (0..).step_by(chunk).zip(ids.chunks(chunk)) {
            let rows = read(&model, &mut cache, id, tokens);
            check(case, first, &rows, &format!("{architecture} in steps of {chunk}"));
        }
    }
}

#[test]
fn a_gguf_file_of_a_hybrid_model_has_the_logits_of_transformers() {
    for (name, architecture) in CASES {
        let (case, contents) = Contents::of(name, architecture);
        check_text(&case, &contents);
    }
}

#[test]
fn the_last_norm_of_lfm2_has_one_of_two_names() {
    let (case, mut contents) = Contents::of("lfm2", "lfm2");
    "output_norm.weight".clone_into(&mut contents.tensor("token_embd_norm.weight").0);
    check_text(&case, &contents);
}

#[test]
fn gate_and_up_of_experts_may_be_in_one_tensor() {
    for (name, architecture) in
        [("granitemoehybrid-experts", "granitehybrid"), ("qwen3_next-experts", "qwen3next")]
    {
        let (case, mut contents) = Contents::of(name, architecture);
        let mut joined = 0;
        for layer in 0..4 {
            let name = |part: &str| format!("blk.{layer}.ffn_{part}_exps.weight");
            let Some(gate) = contents.remove(&name("gate")) else { continue };
            let up = contents.remove(&name("up")).expect("both");
            let rows = gate.1[1] * gate.1[2];
            let pairs = gate.2.chunks(rows).zip(up.2.chunks(rows));
            let both = pairs.flat_map(|(gate, up)| [gate, up].concat()).collect();
            let shape = vec![gate.1[0], 2 * gate.1[1], gate.1[2]];
            contents.tensors.push((name("gate_up"), shape, both));
            joined += 1;
        }
        assert!(joined > 1, "{joined}");
        check_text(&case, &contents);
    }
}

#[test]
fn older_files_of_qwen3_next_have_one_projection() {
    let (case, mut contents) = Contents::of("qwen3_next-dense", "qwen3next");
    for (name, shape, values) in case.weights() {
        if let Some(layer) = name.strip_suffix(".linear_attn.in_proj_qkvz.weight") {
            let layer = layer.rsplit('.').next().expect("a layer");
            for part in ["attn_qkv", "attn_gate"] {
                contents.remove(&format!("blk.{layer}.{part}.weight")).expect("converted");
            }
            contents.tensors.push((format!("blk.{layer}.ssm_in.weight"), shape.to_vec(), values));
        }
    }
    check_text(&case, &contents);
}

#[test]
fn layers_that_predict_tokens_further_ahead_are_left_out() {
    let (case, mut contents) = Contents::of("qwen3_5_text", "qwen35");
    contents.put("block_count", Value::U32(5));
    contents.put("nextn_predict_layers", Value::U32(1));
    for part in ["attn_norm", "attn_q", "nextn.eh_proj", "nextn.enorm"] {
        contents.tensors.push((format!("blk.4.{part}.weight"), vec![48], vec![0.5; 48]));
    }
    check_text(&case, &contents);
}

#[test]
fn rounded_tensors_are_restored_as_others_are() {
    for (name, architecture) in [
        ("qwen3_5_text", "qwen35"),
        ("qwen3_next", "qwen35moe"),
        ("qwen3_next", "qwen3next"),
        ("granitemoehybrid-experts", "granitehybrid"),
    ] {
        let (case, mut contents) = Contents::of(name, architecture);
        contents.is_quantised = true;
        let logits = |contents: &Contents| {
            let model = contents.decoder().expect("a model");
            let mut cache = cache(&model);
            cache.start(SequenceId(1), &[], StartOptions::default()).expect("starts");
            read(&model, &mut cache, SequenceId(1), &case.prompt_ids)
        };
        let rounded = logits(&contents);
        // A file of f32 with the values that the rounded elements have.
        contents.is_quantised = false;
        assert_ne!(logits(&contents), rounded, "{architecture}");
        for (_, shape, values) in &mut contents.tensors {
            let tensor = Tensor::from_slice(values, shape.as_slice(), &Device::Cpu);
            let tensor = QTensor::quantize(&tensor.expect("a tensor"), quantised(shape));
            let tensor = tensor.and_then(|tensor| tensor.dequantize(&Device::Cpu));
            *values = tensor.and_then(|all| all.flatten_all()?.to_vec1()).expect("values");
        }
        assert_eq!(logits(&contents), rounded, "{architecture}");
    }
}
