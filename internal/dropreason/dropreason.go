// Package dropreason names the reasons for dropped packets. reasons.txt is the only list; the C enum, the constants
// here and docs/reference/drop-reasons.md are generated from it.
package dropreason

import "fmt"

//go:generate go run ./gen reasons.txt ../../bpf/common/reason.h reasons_gen.go ../../docs/reference/drop-reasons.md

// Reason is a number of the list; 0 is no reason.
type Reason uint32

func (r Reason) String() string {
	if r.known() {
		return reasons[r].name
	}
	return fmt.Sprintf("reason-%d", uint32(r))
}

// Text returns what happened and what to do about it.
func (r Reason) Text() string {
	if r.known() {
		return reasons[r].text
	}
	return "a reason of another version"
}

// Named returns the reason with a name; 0 if this version has none.
func Named(name string) Reason {
	for r := range reasons {
		if reasons[r].name == name {
			return Reason(r)
		}
	}
	return 0
}

func (r Reason) known() bool { return r > 0 && int(r) < len(reasons) }

// All lists every reason in order.
func All() []Reason {
	all := make([]Reason, 0, len(reasons)-1)
	for r := range reasons[1:] {
		all = append(all, Reason(r+1))
	}
	return all
}
