// Package policies_test has policies in force in a lab, and real packets meet them. What is to arrive is decided by the
// matcher of cyclonus, an implementation that is not ours (internal/policy/policytest).
package policies_test

import "os"

// long reports whether this is the long run, on a machine that does nothing else: it has all cases on each network, and
// judges times.
func long() bool { return os.Getenv("PILASTER_POLICIES_LONG") != "" }
