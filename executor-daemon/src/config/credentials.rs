//! Who is who: the files that say so, read at the start and again on SIGHUP, and the rules between them.

use std::path::PathBuf;

use super::{
    CertificateNames, KnownTenant,
    problem::{Problem, Source},
    secrets::{self, Secrecy},
    tenants::TenantTable,
};
use crate::{
    ids::TenantId,
    tls::{ServerTls, TlsProblem},
};

/// A file and where it was named.
type Named = (PathBuf, Source);

/// Everything that says who may call, by file. [`CredentialFiles::read`] may be called again and again.
#[derive(Debug, Clone)]
pub struct CredentialFiles {
    pub(super) daemon_uid: u32,
    /// Of the default tenant.
    pub(super) token_file: Option<Named>,
    pub(super) tls: Option<TlsFiles>,
    /// `None`: the configuration names no tenants.
    pub(super) tenants: Option<Vec<TenantTable>>,
    /// The token files of `tenants`, by their index there.
    pub(super) tenant_token_files: Vec<(usize, Named)>,
}

/// The files of TLS.
#[derive(Debug, Clone)]
pub(super) struct TlsFiles {
    pub(super) chain: Named,
    pub(super) key: Named,
    pub(super) client_ca: Option<Named>,
}

/// What the files say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Who may call.
    pub tenants: Vec<KnownTenant>,
    /// How TCP speaks TLS. `None`: it does not.
    pub tls: Option<ServerTls>,
}

impl CredentialFiles {
    /// The files that say who may call and who the daemon is.
    pub(super) fn secrets(&self) -> impl Iterator<Item = &std::path::Path> {
        let tokens = self.token_file.iter().chain(self.tenant_token_files.iter().map(|(_, file)| file));
        tokens.chain(self.tls.iter().map(|tls| &tls.key)).map(|(path, _)| path.as_path())
    }

    /// Whether there is any token file.
    pub(super) fn has_tokens(&self) -> bool {
        self.token_file.is_some() || !self.tenant_token_files.is_empty()
    }

    /// Reads the files.
    ///
    /// # Errors
    /// All that is wrong with them, and whatever two tenants would both be known by.
    pub fn read(&self) -> Result<Credentials, Vec<Problem>> {
        let mut problems = Vec::new();
        let mut tokens = |(path, source): &Named| {
            secrets::tokens(path, self.daemon_uid).unwrap_or_else(|problem| {
                problems.push(Problem::new(source.clone(), problem));
                Vec::new()
            })
        };
        let mut default = KnownTenant {
            name: TenantId::default_tenant().0,
            tokens: self.token_file.as_ref().map(&mut tokens).unwrap_or_default(),
            certificates: CertificateNames::Any,
            peer_uids: vec![self.daemon_uid, 0],
        };
        default.peer_uids.dedup();
        let mut known: Vec<KnownTenant> = Vec::new();
        for (index, table) in self.tenants.iter().flatten().enumerate() {
            let file = self.tenant_token_files.iter().find(|(of, _)| *of == index).map(|(_, file)| file);
            known.push(KnownTenant {
                name: table.name.clone(),
                tokens: file.map(&mut tokens).unwrap_or_default(),
                certificates: CertificateNames::These(
                    table.certificate_names.iter().map(|(name, _)| name.clone()).collect(),
                ),
                peer_uids: table.peer_uids.iter().map(|(uid, _)| *uid).collect(),
            });
        }
        self.note_overlaps(&default, &known, &mut problems);
        if self.tenants.is_some() {
            // Who is named is somebody else's; what remains is whoever started the daemon.
            default.certificates = CertificateNames::These(Vec::new());
            default.peer_uids.retain(|uid| !known.iter().any(|tenant| tenant.peer_uids.contains(uid)));
        }
        match known.iter_mut().find(|tenant| tenant.name == default.name) {
            Some(table) => {
                table.tokens.extend(default.tokens);
                table.peer_uids.extend(default.peer_uids);
            }
            None => known.insert(0, default),
        }
        let tls = self.read_tls(&mut problems);
        if problems.is_empty() { Ok(Credentials { tenants: known, tls }) } else { Err(problems) }
    }

    /// Notes what two tenants are both known by: nobody could say whose call it is.
    fn note_overlaps(&self, default: &KnownTenant, known: &[KnownTenant], problems: &mut Vec<Problem>) {
        let tables = self.tenants.iter().flatten();
        for (index, (table, tenant)) in tables.zip(known).enumerate() {
            let before = || known[..index].iter().chain(Some(default).filter(|default| default.name != tenant.name));
            let owner = |has: &dyn Fn(&KnownTenant) -> bool| before().find(|other| has(other)).map(|other| &other.name);
            let shared = |other: &KnownTenant| tenant.tokens.iter().any(|token| other.tokens.contains(token));
            if let (Some(other), Some((_, source))) = (owner(&shared), &table.token_file) {
                problems.push(Problem::new(source.clone(), format!("a token in it is also one of tenant {other}'s")));
            }
            for (name, source) in &table.certificate_names {
                let has = |other: &KnownTenant| match &other.certificates {
                    CertificateNames::These(names) => names.contains(name),
                    CertificateNames::Any => false,
                };
                if let Some(other) = owner(&has) {
                    problems.push(Problem::new(source.clone(), format!("{name} is also tenant {other}'s")));
                }
            }
            for (uid, source) in &table.peer_uids {
                // The default tenant gives way: it has whom nobody else is named for.
                let has = |other: &KnownTenant| other.name != default.name && other.peer_uids.contains(uid);
                if let Some(other) = owner(&has) {
                    problems.push(Problem::new(source.clone(), format!("uid {uid} is also tenant {other}'s")));
                }
            }
        }
    }

    fn read_tls(&self, problems: &mut Vec<Problem>) -> Option<ServerTls> {
        let TlsFiles { chain, key, client_ca } = self.tls.as_ref()?;
        let before = problems.len();
        let mut read = |(path, source): &Named, secrecy| {
            secrets::read(path, self.daemon_uid, secrecy)
                .map_err(|problem| problems.push(Problem::new(source.clone(), problem)))
                .unwrap_or_default()
        };
        let tls = ServerTls {
            chain: read(chain, Secrecy::Public),
            key: read(key, Secrecy::Secret),
            client_ca: client_ca.as_ref().map(|file| read(file, Secrecy::Public)),
            certificate_required: !self.has_tokens(),
        };
        if problems.len() == before
            && let Err(found) = tls.acceptor()
        {
            problems.extend(found.into_iter().filter_map(|problem| {
                let ((_, source), problem) = match problem {
                    TlsProblem::Chain(problem) => (chain, problem),
                    TlsProblem::Key(problem) => (key, problem),
                    TlsProblem::ClientCa(problem) => (client_ca.as_ref()?, problem),
                };
                Some(Problem::new(source.clone(), problem))
            }));
        }
        Some(tls)
    }
}
