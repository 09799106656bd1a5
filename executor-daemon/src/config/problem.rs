//! What is wrong with a configuration, in the words of whoever has to mend it.

use std::{fmt, path::PathBuf};

/// One mistake, one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{source_of_value}: {problem}")]
pub struct Problem {
    source_of_value: Source,
    problem: String,
}

impl Problem {
    pub(super) fn new(source: Source, problem: impl Into<String>) -> Self {
        // A value may hold line breaks; a mistake is one line all the same.
        let problem = problem.into().replace(['\n', '\r'], " ");
        Self { source_of_value: source, problem }
    }

    /// Whether nothing was given, rather than something wrong.
    pub(super) fn is_of_something_missing(&self) -> bool {
        matches!(self.source_of_value, Source::Missing(_))
    }
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// The command line.
    Flag {
        /// Without the dashes.
        flag: &'static str,
        /// The text that was given.
        value: String,
    },
    /// A key of the file.
    Entry {
        file: PathBuf,
        key: String,
        /// As it would be written in the file.
        value: String,
    },
    /// The file as a whole.
    File(PathBuf),
    /// Nothing was given: the key's flag.
    Missing(&'static str),
}

/// A longer value is cut to this many characters in a message.
const MAX_VALUE_CHARS: usize = 120;

fn cut(value: &str) -> String {
    match value.char_indices().nth(MAX_VALUE_CHARS) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag { flag, value } if value.is_empty() => write!(f, "--{flag} \"\""),
            Self::Flag { flag, value } => write!(f, "--{flag} {}", cut(&value.escape_debug().to_string())),
            Self::Entry { file, key, value } => write!(f, "{}: {key} = {}", file.display(), cut(value)),
            Self::File(file) => write!(f, "{}", file.display()),
            Self::Missing(flag) => write!(f, "--{flag}"),
        }
    }
}
