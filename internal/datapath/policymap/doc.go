// Package policymap makes the kernel's policy maps hold the compiled policies of tenants. It computes the difference to
// what is there; the entries that point containers to their rules refer to content that never changes under its id.
package policymap
