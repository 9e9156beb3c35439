// Package policies_test checks policies in a lab with real packets. The matcher of cyclonus, an independent
// implementation, decides which packets must arrive (internal/policy/policytest).
package policies_test

import "os"

// long reports whether this is the long run, which needs an otherwise idle machine. It has all cases on each network,
// and checks durations.
func long() bool { return os.Getenv("PILASTER_POLICIES_LONG") != "" }
