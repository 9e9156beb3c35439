package lab_test

import (
	"encoding/json"
	"errors"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/tenant"
)

const good = `# comment
name: demo
nodes: [n1, n2]
tenants: [{name: blue}, {name: red, addressing: clear}]
containers:
  - {name: b1, node: n1, tenant: blue, labels: {app: web}}
  - name: r1
    node: n2
    tenant: red
`

func TestParseNetwork(t *testing.T) {
	got, err := lab.ParseSpec(
		"lab.yaml",
		[]byte(
			strings.Replace(
				good,
				"name: blue",
				"name: blue, network: nimitz, cidrs: [10.0.0.0/16, 'fd12::/48'], nodeBits: {ipv4: 26}",
				1,
			)+"switches: {n2: ovs}\n",
		),
	)
	want := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("fd12::/48")}
	if err != nil || got.Tenants[0].Network != tenant.Nimitz || !slices.Equal(got.Tenants[0].CIDRs, want) ||
		got.Tenants[0].NodeBits != (lab.NodeBits{IPv4: 26}) || got.Switches["n2"] != lab.OVS || len(got.Switches) != 1 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestParseSpec(t *testing.T) {
	got, err := lab.ParseSpec("x/other.yaml", []byte(good))
	if err != nil {
		t.Fatal(err)
	}
	want := lab.Spec{
		Name: "demo", Nodes: []string{"n1", "n2"},
		Tenants: []lab.Tenant{{Name: "blue"}, {Name: "red", Addressing: tenant.Clear}},
		Containers: []lab.Container{
			{Name: "b1", Node: "n1", Tenant: "blue", Labels: map[string]string{"app": "web"}},
			{Name: "r1", Node: "n2", Tenant: "red"},
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	got, err = lab.ParseSpec("/tmp/my-lab.yaml", []byte("nodes: [n1]\n"))
	if err != nil || got.Name != "my-lab" {
		t.Errorf("default name: %q, %v", got.Name, err)
	}
}

// TestParseRacks: an element of nodes is a name, or a name with a rack.
func TestParseRacks(t *testing.T) {
	yaml := strings.Replace(good, "[n1, n2]", "[{name: n1, rack: a}, n2, {name: n3}, {name: n4, rack: b-2}]", 1)
	got, err := lab.ParseSpec("lab.yaml", []byte(yaml+"mtuReserve: 104\n"))
	want := map[string]string{"n1": "a", "n4": "b-2"}
	if err != nil || !slices.Equal(got.Nodes, []string{"n1", "n2", "n3", "n4"}) || !maps.Equal(got.Racks, want) ||
		got.MTUReserve != 104 {
		t.Errorf("%+v, %v", got, err)
	}
	got, err = lab.ParseSpec("lab.yaml", []byte(`
regions:
  - {name: west, basePrefix: "fd70:696c:6100::/40", nodes: [w1, {name: w2, rack: a}], edge: we}
  - name: east
    basePrefix: "fd70:696c:6200::/40"
    nodes:
      - name: e1
        rack: b
    edge: ee
`))
	if want := map[string]string{"w2": "a", "e1": "b"}; err != nil || !maps.Equal(got.Racks, want) ||
		!slices.Equal(got.AllNodes(), []string{"w1", "w2", "we", "e1", "ee"}) {
		t.Errorf("with regions: %+v, %v", got, err)
	}
}

// TestParseOutside: hosts outside are names or names with addresses, and lab.json keeps them.
func TestParseOutside(t *testing.T) {
	yaml := strings.Replace(good, "name: blue",
		`name: blue, nodes: allow, egress: [{to: "::/0", action: allow, via: [n1]}]`, 1)
	got, err := lab.ParseSpec("lab.yaml", []byte(yaml+
		"outside: [internet, far=2001:db8:9::7]\negressPrefix: 2001:db8:e::/48\n"))
	if err != nil {
		t.Fatal(err)
	}
	far := lab.OutsideHost{Name: "far", Address: netip.MustParseAddr("2001:db8:9::7")}
	rule := lab.EgressRule{To: netip.MustParsePrefix("::/0"), Action: "allow", Via: []string{"n1"}}
	if !slices.Equal(got.Outside, []lab.OutsideHost{{Name: "internet"}, far}) ||
		got.EgressPrefix.String() != "2001:db8:e::/48" || got.Tenants[0].Nodes != "allow" ||
		!reflect.DeepEqual(got.Tenants[0].Egress, []lab.EgressRule{rule}) {
		t.Errorf("%+v", got)
	}
	b, err := json.Marshal(got)
	var again lab.Spec
	if err := errors.Join(err, json.Unmarshal(b, &again)); err != nil || !reflect.DeepEqual(got, again) {
		t.Errorf("%v, after JSON: %+v", err, again)
	}
}

func TestParseSpecNamesTheLine(t *testing.T) {
	for _, c := range []struct{ name, yaml, want string }{
		{"unknown network", strings.Replace(good, "name: blue", "name: blue, network: carpathia", 1),
			`lab.yaml:4: network "carpathia": use netpila, nimitz, ila or evpn`},
		{"CIDRs on netpila", strings.Replace(good, "name: blue", "name: blue, cidrs: [10.0.0.0/16]", 1),
			`lab.yaml:4: cidrs, nodeBits and noNodeCIDRs are for network nimitz or evpn; ` +
				`netpila chooses the addresses itself`},
		{"nimitz without CIDRs", strings.Replace(good, "name: blue", "name: blue, network: nimitz", 1),
			`lab.yaml:4: a tenant of network nimitz needs its own CIDR: write it as cidrs: [10.0.0.0/16], ` +
				`or one of each family`},
		{"egress on nimitz", strings.Replace(good, "name: blue", "name: blue, network: nimitz, cidrs: [10.0.0.0/16], "+
			`egress: [{to: "::/0", action: allow}]`, 1), `lab.yaml:4: egress rules are for network netpila`},
		{"gateway without a node", strings.Replace(good, "name: blue", "name: blue, "+
			`egress: [{to: "::/0", action: allow, via: [n9]}]`, 1), `lab.yaml:4: no node is called "n9"`},
		{"action", strings.Replace(good, "name: blue", `name: blue, egress: [{to: "::/0", action: drop}]`, 1),
			`lab.yaml:4: action "drop": use allow or deny`},
		{"outside in the cluster", good + "outside: [internet, far=fd70:696c:6100:9::2]\n",
			`lab.yaml:10: address fd70:696c:6100:9::2 of far is in a prefix of the cluster or of the fabric`},
		{"outside at the router", good + "outside: [far=2001:db8:9::1]\n", `lab.yaml:10: address 2001:db8:9::1 of ` +
			`far: the router has the address before it, so the first one is 2001:db8:9::2`},
		{"outside with a node's name", good + "outside: [n1]\n", `lab.yaml:10: a node is already called "n1"`},
		{"two CIDRs of a family", strings.Replace(good, "name: blue", "name: blue, network: nimitz, cidrs: "+
			"[10.0.0.0/16, 10.1.0.0/16]", 1),
			`lab.yaml:4: 10.0.0.0/16 and 10.1.0.0/16 are of one family; a tenant has one CIDR of each at most`},
		{"addressing on nimitz", strings.Replace(good, "name: red,",
			"name: red, network: nimitz, cidrs: [10.0.0.0/16],", 1),
			`lab.yaml:4: addressing is for network netpila or ila; ` +
				`on nimitz containers have addresses of the tenant's own`},
		{"encrypted on ila", strings.Replace(good, "name: red, addressing: clear",
			"name: red, network: ila, addressing: encrypted", 1),
			`lab.yaml:4: addressing "encrypted": use clear`},
		{"node bits on netpila", strings.Replace(good, "name: blue", "name: blue, nodeBits: {ipv4: 26}", 1),
			`lab.yaml:4: cidrs, nodeBits and noNodeCIDRs are for network nimitz`},
		{"node bits as long as the CIDR", strings.Replace(good, "name: blue", "name: blue, network: nimitz, cidrs: "+
			"[10.0.0.0/16], nodeBits: {ipv4: 16}", 1), `lab.yaml:4: node bits 16 leave no room in CIDR 10.0.0.0/16`},
		{"negative node bits", strings.Replace(good, "name: blue", "name: blue, network: nimitz, cidrs: "+
			"[10.0.0.0/16], nodeBits: {ipv4: -1}", 1), `lab.yaml:4: node bits -1 leave no room`},
		{"node bits without such a CIDR", strings.Replace(good, "name: blue", "name: blue, network: nimitz, cidrs: "+
			"[10.0.0.0/16], nodeBits: {ipv6: 96}", 1),
			`lab.yaml:4: nodeBits for a family without a CIDR of tenant blue`},
		{"node bits and noNodeCIDRs", strings.Replace(good, "name: blue", "name: blue, network: nimitz, cidrs: "+
			"[10.0.0.0/16], nodeBits: {ipv4: 26}, noNodeCIDRs: true", 1),
			`lab.yaml:4: use either nodeBits or noNodeCIDRs`},
		{"node bits of an unknown family", strings.Replace(good, "name: blue", "name: blue, network: nimitz, cidrs: "+
			"[10.0.0.0/16], nodeBits: {ip: 26}", 1), `lab.yaml:4: unknown key "ip": the keys here are ipv4, ipv6`},
		{"switch of an unknown node", good + "switches:\n  n3: ovs\n", `lab.yaml:11: no node is called "n3"`},
		{"unknown switch", good + "switches:\n  n1: ebpf\n  n2: vpp\n",
			`lab.yaml:12: switch "vpp" of node n2: use ebpf or ovs`},
		{"unknown mappings", good + "ilaMappings: poll\n", `lab.yaml:10: ilaMappings "poll": use push or pull`},
		{"unknown key", strings.Replace(good, "tenant: red", "tennant: red", 1),
			`lab.yaml:9: unknown key "tennant": ` +
				`the keys here are name, node, tenant, labels, addressKey, publish, namespace, namespaceLabels, ports`},
		{"unknown key at the top", good + "colour: blue\n",
			`lab.yaml:10: unknown key "colour": ` +
				`the keys here are name, nodes, regions, device, mtuReserve, uplinks, outside, egressPrefix, nimitz, ` +
				`switches, ila, ilaMappings, evpn, tenants, containers`},
		{"unknown key of a tenant", strings.Replace(good, "addressing: clear", "cidr: [10.0.0.0/16]", 1),
			`lab.yaml:4: unknown key "cidr": ` +
				`the keys here are name, network, addressing, cidrs, regions, nodeBits, noNodeCIDRs, egress, nodes`},
		{"unknown key of a node", strings.Replace(good, "[n1, n2]", "[n1, {name: n2, row: 1}]", 1),
			`lab.yaml:3: unknown key "row" of a node: the keys here are name, rack`},
		{"empty rack", strings.Replace(good, "[n1, n2]", "[n1, {name: n2, rack: ''}]", 1),
			`lab.yaml:3: the rack of node "n2" is empty`},
		{"name of a rack", strings.Replace(good, "[n1, n2]", "[n1, {name: n2, rack: Row_1}]", 1),
			`lab.yaml:3: rack name "Row_1": 1 to 63 lower-case letters`},
		{"rack without a node", strings.Replace(good, "[n1, n2]", "[n1, {rack: a}]", 1), `lab.yaml:3: name ""`},
		{"negative reserve", good + "mtuReserve: -1\n", "lab.yaml:10: mtuReserve -1 is negative"},
		{"duplicate key", good + "nodes: [n1]\n", `lab.yaml:10: mapping key "nodes" already defined`},
		{"duplicate node", strings.Replace(good, "[n1, n2]", "[n1,\n  n1]", 1),
			`lab.yaml:4: a node is already called "n1"`},
		{"duplicate tenant", strings.Replace(good, "name: red", "name: blue", 1),
			`lab.yaml:4: a tenant is already called "blue"`},
		{"duplicate container", strings.Replace(good, "name: r1", "name: b1", 1),
			`lab.yaml:7: a container is already called "b1"`},
		{"container with the name of a node", strings.Replace(good, "name: r1", "name: n2", 1),
			`lab.yaml:7: a node is already called "n2"`},
		{"reserved name", strings.Replace(good, "[n1, n2]", "[n1, n2, router]", 1),
			`lab.yaml:3: the fabric is already called "router"`},
		{"unknown node", strings.Replace(good, "node: n2", "node: n7", 1), `lab.yaml:8: no node is called "n7"`},
		{"missing node", strings.Replace(good, "    node: n2\n", "", 1), `lab.yaml:7: no node is called ""`},
		{"unknown tenant", strings.Replace(good, "tenant: red", "tenant: green", 1),
			`lab.yaml:9: no tenant is called "green"`},
		{"labels", strings.Replace(good, "app: web", "app: 'we b'", 1), `lab.yaml:6: label app: value "we b"`},
		{"namespace", strings.Replace(good, "app: web}", "app: web}, namespace: 'sh op'", 1),
			`lab.yaml:6: label io.kubernetes.pod.namespace: value "sh op"`},
		{"ports", strings.Replace(good, "app: web}", "app: web}, ports: {http: tcp}", 1),
			`lab.yaml:6: port "tcp": use 80/TCP`},
		{"names of ports", strings.Replace(good, "app: web}", "app: web}, ports: {HTTP: 80}", 1),
			`lab.yaml:6: "HTTP" is no name of a port`},
		{"address key", strings.Replace(good, "app: web}", "app: web}, addressKey: db-0", 1),
			`lab.yaml:6: address key "db-0": tenant blue is on network netpila, where an address stays on its node`},
		{"characters of an address key", strings.Replace(good, "app: web}", "app: web}, addressKey: 'db 0'", 1),
			`lab.yaml:6: address key "db 0": at most 128 letters, digits or . _ - / are allowed`},
		{"host port", strings.Replace(good, "app: web}", "app: web}, publish: ['80']", 1),
			`lab.yaml:6: "80": use HOSTPORT:PORT`},
		{"host port twice", strings.Replace(good, "app: web}", "app: web}, publish: ['80:1', '80:2']", 1),
			`lab.yaml:6: host ports 80/TCP to 1 and 80/TCP to 2 exclude each other`},
		{"addressing", strings.Replace(good, "clear", "secret", 1), `lab.yaml:4: addressing "secret"`},
		{"device", good + "device: bond\n", `lab.yaml:10: device "bond": use veth, macvlan, netkit, auto`},
		{"macvlans and nimitz", good + "device: macvlan\nnimitz: ebpf\n", "lab.yaml:10: device macvlan does not work " +
			"with network nimitz"},
		{"empty device", good + "device: \"\"\n",
			`lab.yaml:10: device is empty: use veth, macvlan, netkit, auto, or omit it`},
		{"no device", good + "device:\n", `lab.yaml:10: device is empty`},
		{"list of devices", good + "device: [veth]\n", `lab.yaml:10: device: a list where a single word is expected`},
		{"list in a list", strings.Replace(good, "[n1, n2]", "[[n1]]", 1),
			`lab.yaml:3: nodes: write a name, or a name with its rack, such as {name: n1, rack: a}`},
		{"bad name", strings.Replace(good, "name: r1", "name: R_1", 1), `lab.yaml:7: name "R_1"`},
		{"bad lab name", strings.Replace(good, "name: demo", "name: Demo", 1), `lab.yaml:2: name "Demo"`},
		{"no nodes", "name: x\n", `lab.yaml: a lab has 1 to 1000 nodes`},
		{"wrong type", strings.Replace(good, "[n1, n2]", "7", 1), `lab.yaml:3: `},
		{"syntax", good + "  - {", `lab.yaml:10: `},
		{"empty", "", `lab.yaml: a lab has`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := lab.ParseSpec("lab.yaml", []byte(c.yaml))
			if err == nil || !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("got %+v, %v\nwant %s", s, err, c.want)
			}
		})
	}
}

const regional = `name: two
regions:
  - {name: west, basePrefix: 'fd70:696c:6100::/40', nodes: [w1, w2], edge: we}
  - name: east
    basePrefix: fd70:696c:6200::/40
    nodes: [e1]
    edge: ee
tenants:
  - {name: green}
  - name: blue
    network: nimitz
    regions: {west: [10.0.0.0/16], east: [10.1.0.0/16, 'fd12::/48']}
containers:
  - {name: b1, node: w1, tenant: blue}
  - {name: b2, node: e1, tenant: blue}
`

func TestParseRegions(t *testing.T) {
	got, err := lab.ParseSpec("lab.yaml", []byte(regional))
	if err != nil {
		t.Fatal(err)
	}
	if all := got.AllNodes(); !slices.Equal(all, []string{"w1", "w2", "we", "e1", "ee"}) {
		t.Errorf("got nodes %v", all)
	}
	if r, ok := got.RegionOf("ee"); !ok || r.Name != "east" || r.Edge != "ee" ||
		r.BasePrefix != netip.MustParsePrefix("fd70:696c:6200::/40") {
		t.Errorf("got region %+v of ee, %v", r, ok)
	}
	if want := netip.MustParsePrefix("10.0.0.0/16"); !slices.Equal(
		got.Tenants[1].Regions["west"],
		[]netip.Prefix{want},
	) {
		t.Errorf("got tenants %+v", got.Tenants)
	}
	for _, c := range []struct{ name, old, new, want string }{
		{"nodes beside regions", "tenants:", "nodes: [n1]\ntenants:",
			`lab.yaml:8: a lab with regions lists its nodes in its regions`},
		{"two regions with one name", "name: east", "name: west", `lab.yaml:4: a region is already called "west"`},
		{"region with the name of a node", "name: east", "name: w1", `lab.yaml:4: a node is already called "w1"`},
		{"a node in two regions", "[e1]", "[w1]", `lab.yaml:6: a node is already called "w1"`},
		{"no edge", "    edge: ee\n", "", `lab.yaml:4: region east needs an Edge Switch: name one with edge:`},
		{"an edge that is a node", "edge: ee", "edge: e1", `lab.yaml:7: a node is already called "e1"`},
		{"no base prefix", "    basePrefix: fd70:696c:6200::/40\n", "",
			`lab.yaml:4: base prefix invalid Prefix is not an IPv6 prefix`},
		{"overlapping base prefixes", "fd70:696c:6200::/40", "fd70:696c:6100::/48",
			`lab.yaml:5: base prefix fd70:696c:6100::/48 overlaps fd70:696c:6100::/40 of region west`},
		{"an invalid base prefix", "fd70:696c:6200::/40", "fe80::/40",
			`lab.yaml:5: base prefix fe80::/40 overlaps multicast`},
		{"CIDRs without regions", "regions: {west: [10.0.0.0/16], east: [10.1.0.0/16, 'fd12::/48']}",
			"cidrs: [10.0.0.0/16]", `lab.yaml:10: in a lab with regions, write a tenant's CIDRs by region`},
		{"CIDRs of an unknown region", "{west: [10.0.0.0/16], east:", "{west: [10.0.0.0/16], north:",
			`lab.yaml:12: no region is called "north"`},
		{"overlapping CIDRs", "10.1.0.0/16,", "10.0.128.0/17,",
			`lab.yaml:12: 10.0.128.0/17 in region east and 10.0.0.0/16 in another overlap`},
		{"two CIDRs of a family", "'fd12::/48'", "10.2.0.0/16",
			`lab.yaml:10: 10.1.0.0/16 and 10.2.0.0/16 are of one family`},
		{"regions of a netpila tenant", "name: green", "name: green, regions: {west: [10.0.0.0/16]}",
			`lab.yaml:9: cidrs, nodeBits and noNodeCIDRs are for network nimitz`},
		{"a container on an edge", "node: e1", "node: ee",
			`lab.yaml:15: node "ee" is the Edge Switch of region east, and has no containers`},
		{"a container in a region without its tenant", ", east: [10.1.0.0/16, 'fd12::/48']", "",
			`lab.yaml:15: tenant "blue" has no CIDRs in region east`},
	} {
		if !strings.Contains(regional, c.old) {
			t.Fatalf("%s: the spec lacks %q", c.name, c.old)
		}
		_, err := lab.ParseSpec("lab.yaml", []byte(strings.Replace(regional, c.old, c.new, 1)))
		if err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
	}
	_, err = lab.ParseSpec(
		"lab.yaml",
		[]byte(strings.Replace(good, "name: blue", "name: blue, network: nimitz, regions: {west: [10.0.0.0/16]}", 1)),
	)
	if err == nil || !strings.Contains(err.Error(), "this lab has no regions") {
		t.Errorf("regions of a tenant in a lab without regions: got error %v", err)
	}
}

func FuzzParseSpec(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte(regional))
	f.Add([]byte("nodes: [&a n1, *a]\nname: {}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := lab.ParseSpec("lab.yaml", b)
		if err == nil && s.Validate() != nil {
			t.Errorf("ParseSpec returned an invalid spec: %+v", s)
		}
	})
}
