// Package sysdump collects the state of a node in one archive, for remote diagnosis. For each part, the archive has the
// part or the error, because a daemon may be stopped. The archive has no secrets, because its parts have types without
// keys, or are messages without fields of type bytes. Logs are not filtered.
package sysdump
