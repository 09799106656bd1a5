//! The committed code and descriptors are what `executor/v1/executor.proto` gives, and the protocol changes only by
//! additions. `UPDATE_GENERATED=1 cargo test -p executor-proto` renews the files.

use std::{collections::BTreeSet, error::Error, fs, path::Path};

use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorSet};
use protox::prost::Message as _;

const PROTO: &str = "executor/v1/executor.proto";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn compile() -> Result<FileDescriptorSet, Box<dyn Error>> {
    let mut compiler = protox::Compiler::new([root()])?;
    compiler.include_source_info(true).include_imports(true).open_file(PROTO)?;
    Ok(compiler.file_descriptor_set())
}

/// Fails when `path` differs from `wanted`, or writes it when asked to.
fn current(path: &Path, wanted: &[u8]) -> Result<(), Box<dyn Error>> {
    if std::env::var_os("UPDATE_GENERATED").is_some() {
        fs::write(path, wanted)?;
    }
    assert!(
        fs::read(path).unwrap_or_default() == wanted,
        "{} is out of date: run UPDATE_GENERATED=1 cargo test -p executor-proto",
        path.display()
    );
    Ok(())
}

#[test]
fn generated_code_and_descriptors_are_current() -> Result<(), Box<dyn Error>> {
    let mut descriptors = compile()?;
    let out = tempfile_dir()?;
    tonic_prost_build::configure().bytes(".").out_dir(&out).compile_fds(descriptors.clone())?;
    let code = fs::read(out.join("executor.v1.rs"))?;
    fs::remove_dir_all(&out)?;
    current(&root().join("src/executor.v1.rs"), &code)?;
    for file in &mut descriptors.file {
        file.source_code_info = None;
    }
    current(&root().join("src/executor.v1.bin"), &descriptors.encode_to_vec())
}

fn tempfile_dir() -> std::io::Result<std::path::PathBuf> {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("generated-{}", std::process::id()));
    fs::create_dir_all(&path)?;
    Ok(path)
}

/// One line for each thing that a peer of another version relies on.
fn surface(set: &FileDescriptorSet) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for file in &set.file {
        for service in &file.service {
            for method in &service.method {
                lines.insert(format!(
                    "rpc {}/{} {}{} -> {}{}",
                    service.name(),
                    method.name(),
                    if method.client_streaming() { "stream " } else { "" },
                    method.input_type(),
                    if method.server_streaming() { "stream " } else { "" },
                    method.output_type()
                ));
            }
        }
        for message in &file.message_type {
            message_surface(file.package(), message, &mut lines);
        }
        for one in &file.enum_type {
            enum_surface(file.package(), one, &mut lines);
        }
    }
    lines
}

fn message_surface(scope: &str, message: &DescriptorProto, lines: &mut BTreeSet<String>) {
    let name = format!("{scope}.{}", message.name());
    for field in &message.field {
        lines.insert(format!(
            "field {name} {} = {} {:?} {:?} {}{}",
            field.name(),
            field.number(),
            field.label(),
            field.r#type(),
            field.type_name(),
            if field.proto3_optional() { " optional" } else { "" }
        ));
    }
    for nested in &message.nested_type {
        message_surface(&name, nested, lines);
    }
    for nested in &message.enum_type {
        enum_surface(&name, nested, lines);
    }
}

fn enum_surface(scope: &str, one: &EnumDescriptorProto, lines: &mut BTreeSet<String>) {
    for value in &one.value {
        lines.insert(format!("enum {scope}.{} {} = {}", one.name(), value.name(), value.number()));
    }
}

/// The golden file is what revision 1 promised. A line that is missing from today's surface is a broken promise; a new
/// line is an addition and is written down with `UPDATE_GENERATED=1`.
#[test]
fn the_protocol_changes_only_by_additions() -> Result<(), Box<dyn Error>> {
    let path = root().join("tests/surface.txt");
    let today = surface(&compile()?);
    let text: String = today.iter().map(|line| format!("{line}\n")).collect();
    let promised: BTreeSet<String> = fs::read_to_string(&path).unwrap_or_default().lines().map(str::to_owned).collect();
    let broken: Vec<&String> = promised.difference(&today).collect();
    assert!(broken.is_empty(), "no longer in the protocol: {broken:#?}");
    current(&path, text.as_bytes())
}

#[test]
fn every_element_has_a_comment() -> Result<(), Box<dyn Error>> {
    let set = compile()?;
    let file = set.file.iter().find(|file| file.name() == PROTO).expect("the file that was compiled");
    let info = file.source_code_info.as_ref().expect("source info was asked for");
    // Paths of fields, enum values, rpcs and services; empty messages and containers of a oneof say enough by themselves.
    let described = |path: &[i32]| {
        matches!(path, [4, _, 2, _] | [4, _, 3, _, 2, _] | [5, _] | [5, _, 2, _] | [6, _] | [6, _, 2, _])
    };
    for location in &info.location {
        let here = location.span.first().map_or(0, |line| line + 1);
        assert!(!described(&location.path) || location.leading_comments.is_some(), "no comment at {PROTO}:{here}");
    }
    Ok(())
}
