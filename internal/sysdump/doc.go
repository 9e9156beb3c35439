// Package sysdump collects what an engineer needs to help from afar into one archive: parts that each
// succeed or are named with their error, whether daemons run or not. Secrets stay out because what is
// written has no place for them: types without keys, messages without bytes. Nothing is filtered.
package sysdump
