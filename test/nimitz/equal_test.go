package nimitz_test

import (
	"bytes"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// TestEqualAddresses: if containers of two tenants have the same address, a ping to this address does not test
// isolation, because the container of the sender's own tenant replies. lab ping reports this.
func TestEqualAddresses(t *testing.T) {
	l := labtest.New(t, lab.Spec{
		Nodes: []string{"n1", "n2"},
		Tenants: []lab.Tenant{{Name: "blue", Network: "nimitz", CIDRs: []netip.Prefix{ten}},
			{Name: "red", Network: "nimitz", CIDRs: []netip.Prefix{ten}}},
		Containers: []lab.Container{
			{Name: "b1", Node: "n1", Tenant: "blue"}, {Name: "b2", Node: "n2", Tenant: "blue"},
			{Name: "r1", Node: "n1", Tenant: "red"}, {Name: "r2", Node: "n2", Tenant: "red"},
			{Name: "r3", Node: "n2", Tenant: "red"},
		},
	})
	address := map[string]netip.Addr{}
	for _, c := range l.Containers() {
		address[c.Name] = c.Address
	}
	if address["b1"] != address["r1"] || address["b2"] != address["r2"] {
		t.Fatalf("the addresses are not equal: %v", address)
	}
	ping := func(args ...string) (int, string) {
		var out bytes.Buffer
		cmd := exec.CommandContext(labtest.Context(t), labtest.Binary(t),
			append([]string{"lab", "ping", "--lab", l.Name()}, args...)...)
		cmd.Stdout, cmd.Stderr = &out, &out
		status, ran := lab.ExitStatus(cmd.Run())
		if !ran {
			t.Fatalf("lab ping %v did not run", args)
		}
		return status, out.String()
	}
	// Only pairs with r3 test the isolation of tenants, because no container of blue has r3's address.
	if status, out := ping(); status != 0 || !strings.Contains(out, "\n10 of 10 as expected\nown: ") {
		t.Errorf("exit %d\n%s", status, out)
	}
	if status, out := ping("b1", "r2"); status != 1 ||
		out != "b1 → r2: nothing sent, because "+address["r2"].String()+
			" is the address of b2 in tenant blue too\n" {
		t.Errorf("exit %d\n%s", status, out)
	}
	if status, out := ping("r2", "b2"); status != 1 ||
		!strings.Contains(out, "is the address of r2 in tenant red too") {
		t.Errorf("exit %d\n%s", status, out)
	}
	if status, out := ping("b1", "r3"); status != 1 || !strings.Contains(out, "0 of 3 answered") {
		t.Errorf("exit %d\n%s", status, out)
	}
}
