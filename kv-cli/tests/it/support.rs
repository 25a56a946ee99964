//! Runs the program, and makes copies of the bundled model for it.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

pub(crate) struct Output {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv"));
    command.args(args).stdin(Stdio::null()).env("RUST_BACKTRACE", "1");
    // Without it, graphics drivers complain on standard error.
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        command.env("XDG_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
    }
    command
}

pub(crate) fn kv(args: &[&str]) -> Output {
    let output = command(args).output().expect("the program starts");
    Output {
        code: output.status.code().expect("no signal"),
        stdout: String::from_utf8(output.stdout).expect("UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("UTF-8"),
    }
}

/// Runs with `--json`: exactly one object on standard output.
pub(crate) fn json(args: &[&str]) -> Value {
    let output = kv(&[args, &["--json"]].concat());
    assert_eq!(output.code, 0, "{args:?}: {}", output.stderr);
    assert_eq!(output.stderr, "", "{args:?}");
    assert_eq!(output.stdout.lines().count(), 1, "{args:?}");
    let value: Value = serde_json::from_str(&output.stdout).expect("JSON");
    assert!(value.is_object());
    value
}

/// Runs to a failure: this exit code, one line with these words, nothing on standard output.
pub(crate) fn fails(args: &[&str], code: i32, words: &str) {
    let output = kv(args);
    let Output { stdout, stderr, .. } = &output;
    assert_eq!(output.code, code, "{args:?}: {stderr}");
    assert_eq!(stdout, "", "{args:?}");
    assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    assert!(stderr.starts_with("kv: ") && stderr.contains(words), "{args:?}: {stderr}");
    assert!(!stderr.contains("internal error"), "{args:?}: {stderr}");
    assert!(!stderr.contains("::"), "{args:?}: a backtrace is no message: {stderr}");
}

/// Returns the path of a test text.
pub(crate) fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    path.to_str().expect("UTF-8").to_owned()
}

/// Runs `kv eval --json` on the test text: one list on one line.
pub(crate) fn eval(extra: &[&str]) -> Vec<Value> {
    let text = data("eval.txt");
    let output = kv(&[&["eval", "--json", "--text", &text], extra].concat());
    let Output { code, stdout, stderr } = &output;
    assert_eq!((*code, stderr.as_str()), (0, ""), "{extra:?}");
    assert_eq!(stdout.lines().count(), 1, "{stdout}");
    serde_json::from_str::<Value>(stdout).expect("JSON").as_array().expect("a list").clone()
}

/// Returns a field that is a number.
pub(crate) fn number(line: &Value, field: &str) -> f64 {
    line[field].as_f64().unwrap_or_else(|| panic!("{field}: {line}"))
}

pub(crate) fn tokens(value: &Value) -> Vec<u64> {
    let ids = value.as_array().expect("a list of tokens");
    ids.iter().map(|id| id.as_u64().expect("a token")).collect()
}

/// Returns the generated tokens of every sequence.
pub(crate) fn all_tokens(report: &Value) -> Vec<Vec<u64>> {
    let sequences = report["sequences"].as_array().expect("sequences");
    sequences.iter().map(|sequence| tokens(&sequence["tokens"])).collect()
}

pub(crate) fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K")
}

/// A copy of the bundled model that a test may damage.
pub(crate) struct ModelDir(TempDir);

impl ModelDir {
    pub(crate) fn copy() -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        for file in ["config.json", "model.safetensors", "tokenizer.json"] {
            fs::copy(bundled().join(file), dir.path().join(file)).expect(file);
        }
        Self(dir)
    }

    pub(crate) fn path(&self) -> &str {
        self.0.path().to_str().expect("UTF-8")
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.file(name), bytes).expect(name);
    }

    /// Sets one field of config.json to a JSON value, or removes it.
    pub(crate) fn set(&self, field: &str, value: Option<Value>) {
        let text = fs::read_to_string(self.file("config.json")).expect("config.json");
        let mut config: Value = serde_json::from_str(&text).expect("JSON");
        let object = config.as_object_mut().expect("an object");
        match value {
            Some(value) => object.insert(field.to_owned(), value),
            None => object.remove(field),
        };
        self.write("config.json", config.to_string());
    }
}

/// One tensor of a safetensors file.
#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Entry {
    pub(crate) fn f32(name: &str, shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { name: name.to_owned(), dtype: "F32".to_owned(), shape: shape.to_vec(), bytes }
    }

    pub(crate) fn values(&self) -> Vec<f32> {
        let value = |b: &[u8]| f32::from_le_bytes(b.try_into().expect("four bytes"));
        self.bytes.chunks_exact(4).map(value).collect()
    }
}

/// Returns the tensors of the bundled model.
pub(crate) fn entries() -> Vec<Entry> {
    let bytes = fs::read(bundled().join("model.safetensors")).expect("weights");
    let (length, rest) = bytes.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    let (header, data) = rest.split_at(usize::try_from(length).expect("small"));
    let header: Value = serde_json::from_slice(header).expect("JSON");
    let number = |value: &Value| usize::try_from(value.as_u64().expect("a number")).expect("small");
    let tensors = header.as_object().expect("an object").iter();
    tensors
        .filter(|(name, _)| *name != "__metadata__")
        .map(|(name, tensor)| {
            let [begin, end] = [0, 1].map(|i| number(&tensor["data_offsets"][i]));
            Entry {
                name: name.clone(),
                dtype: tensor["dtype"].as_str().expect("text").to_owned(),
                shape: tensor["shape"].as_array().expect("a list").iter().map(number).collect(),
                bytes: data[begin..end].to_vec(),
            }
        })
        .collect()
}

/// Makes the bytes of a safetensors file.
pub(crate) fn safetensors(entries: &[Entry]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for entry in entries {
        let begin = data.len();
        data.extend_from_slice(&entry.bytes);
        let offsets = [begin, data.len()];
        header.insert(
            entry.name.clone(),
            serde_json::json!({
                "dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets
            }),
        );
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = u64::try_from(header.len()).expect("small").to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    file
}
