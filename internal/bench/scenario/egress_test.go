package scenario

import (
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// TestEgressScenarios: each scenario translates the client's address to the one that it should measure.
func TestEgressScenarios(t *testing.T) {
	first, second := address.DefaultPlan().Node(1), address.DefaultPlan().Node(2)
	ofNode := func(a netip.Addr) bool { return a == netip.MustParseAddr("2001:db8:70::2") }
	seen := map[string]func(netip.Addr) bool{
		"egress": func(a netip.Addr) bool {
			return a == tenant.EgressAddress(first, tenant.FirstEgressIndex+1)
		},
		"egress-gateway": func(a netip.Addr) bool {
			return a == tenant.EgressAddress(second, tenant.FirstGatewayIndex)
		},
		"egress-nptv6":            first.Contains,
		"egress-masquerade":       ofNode,
		"egress-masquerade-vxlan": ofNode,
	}
	offered, leftOut := Offered(EgressScenarios())
	t.Logf("left out: %q", leftOut)
	if len(offered) < 2 {
		t.Fatal("the scenarios of our datapath are left out")
	}
	for _, s := range offered {
		t.Run(s.Name, func(t *testing.T) {
			must(t, Once(filepath.Join(t.TempDir(), "w"), s, func(p Pair) error {
				client, err := clientOf(p)
				if err == nil && !seen[s.Name](client) {
					t.Errorf("the server sees the client as %v", client)
				}
				return err
			}))
		})
	}
}

// clientOf connects the pair, and returns the client's address as the server sees it.
func clientOf(p Pair) (a netip.Addr, err error) {
	const patience = 10 * time.Second
	var l net.Listener
	if err := p.Server.Do(func() (err error) { l, err = net.Listen("tcp6", "[::]:0"); return err }); err != nil {
		return a, err
	}
	defer l.Close()
	to := netip.AddrPortFrom(p.Target, uint16(l.Addr().(*net.TCPAddr).Port))
	err = p.Client.Do(func() error {
		c, err := net.DialTimeout("tcp6", to.String(), patience)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	if err != nil {
		return a, err
	}
	c, err := l.Accept()
	if err != nil {
		return a, err
	}
	defer c.Close()
	return c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(), nil
}

// TestLacksRule: a machine without ip6tables, or without a target, lacks the scenario, and the reason says what.
func TestLacksRule(t *testing.T) {
	if err := lacksRule([]string{"-t", "nat", "-A", "POSTROUTING", "-j", "NONSENSE"})(); err == nil ||
		!strings.Contains(err.Error(), "NONSENSE") {
		t.Errorf("a target that does not exist: %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	if err := lacksRule(masquerade)(); err == nil || !strings.Contains(err.Error(), "(Debian: iptables)") {
		t.Errorf("without ip6tables: %v", err)
	}
}
