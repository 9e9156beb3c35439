package cli

import (
	"testing"

	"pilaster.io/pilaster/internal/lab"
)

// TestLabPingPolicies: lab ping expects no reply between containers if policies deny the echo.
func TestLabPingPolicies(t *testing.T) {
	answered, lost := lab.Echo{Sent: 3, Received: 3}, lab.Echo{Sent: 3}
	denied := func(e lab.Echo) lab.Echo { e.Denied = true; return e }
	for name, c := range map[string]struct {
		echo  lab.Echo
		must  bool
		cell  string
		right bool
	}{
		"allowed, answered":      {answered, true, "ok", true},
		"allowed, lost":          {lost, true, "drop", false},
		"denied, lost":           {denied(lost), true, "denied", true},
		"denied, answered":       {denied(answered), true, "ok", false},
		"other tenant, lost":     {lost, false, "drop", true},
		"other tenant, answered": {answered, false, "ok", false},
	} {
		if cell, what := outcome(c.echo), complaint(c.echo, c.must); cell != c.cell || (what == "") != c.right {
			t.Errorf("%s: got cell %q, complaint %q; want cell %q, expected: %v", name, cell, what, c.cell, c.right)
		}
	}
}
