package sim

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/specfile"
	"pilaster.io/pilaster/internal/tenant"
)

// Scenario describes a simulated cluster and its events.
type Scenario struct {
	Name              string            `yaml:"name"              json:"name"`
	Seed              uint64            `yaml:"seed"              json:"seed"`
	Network           string            `yaml:"network"           json:"network"`               // empty means the default
	Addressing        tenant.Addressing `yaml:"addressing"        json:"addressing"`            // on a network without own CIDRs; empty means encrypted
	CIDR              netip.Prefix      `yaml:"cidr"              json:"cidr,omitzero"`         // on a network with own CIDRs, of each tenant; empty means fd10::/48
	NodeBits          int               `yaml:"nodeBits"          json:"nodeBits,omitempty"`    // of a node's subnet of it; 0 means 80
	NoNodeCIDRs       bool              `yaml:"noNodeCIDRs"       json:"noNodeCIDRs,omitempty"` // addresses are allocated one by one, without subnets of nodes
	MappingsBy        string            `yaml:"mappingsBy"        json:"mappingsBy,omitempty"`  // on a network with mappings: how nodes receive them; empty means by stream
	ActivePeers       int               `yaml:"activePeers"       json:"activePeers,omitempty"` // mappings that each node subscribes to; 0: it receives all
	Tenants           int               `yaml:"tenants"           json:"tenants"`               // 0 means 1; containers are assigned to them in turn
	Services          int               `yaml:"services"          json:"services,omitempty"`    // of each tenant, of all its containers
	Nodes             int               `yaml:"nodes"             json:"nodes"`
	ContainersPerNode int               `yaml:"containersPerNode" json:"containersPerNode"`
	AtOnce            int               `yaml:"atOnce"            json:"atOnce"`   // nodes that an event handles concurrently; 0 means 512
	ListRate          int               `yaml:"listRate"          json:"listRate"` // the orchestrator's rate limit of queries, per second; 0 means no limit
	Events            []Event           `yaml:"events"            json:"events"`
	Limits            Limits            `yaml:"limits"            json:"limits,omitzero"`
}

// Event is one change of the cluster.
type Event struct {
	Do     string        `yaml:"do"     json:"do"`
	By     Amount        `yaml:"by"     json:"by,omitzero"` // number of nodes
	Within time.Duration `yaml:"within" json:"within,omitzero"`

	Times     int  `yaml:"times"     json:"times,omitempty"`     // of change-policy and change-endpoint; 0 means 100
	PerSecond int  `yaml:"perSecond" json:"perSecond,omitempty"` // of change-endpoint; 0: one after the other
	ListFirst bool `yaml:"listFirst" json:"listFirst,omitempty"` // for grow with mappings: all new nodes list the mappings before one gets a subnet
}

// How nodes receive mappings of other nodes' containers.
const (
	ByStream = "stream" // updates on their streams
	ByQuery  = "query"  // nodes of the set-up query once after each event, as NIMITZ §4.1 counts
)

// asks reports whether the nodes of the set-up query for mappings.
func (s Scenario) asks() bool { return s.MappingsBy == ByQuery }

// Limits apply to a whole run; 0 means no limit.
type Limits struct {
	Time     time.Duration `yaml:"time"     json:"time,omitzero"`
	Memory   Size          `yaml:"memory"   json:"memory,omitzero"`   // resident set of this process
	Messages int64         `yaml:"messages" json:"messages,omitzero"` // of calls and streams, without heartbeats
}

// Kinds of events.
const (
	Grow                = "grow"                 // new nodes join and get containers
	Shrink              = "shrink"               // nodes lose their containers, stop and are deleted
	RestartJob          = "restart-job"          // all containers of some nodes are removed and as many are created
	Crash               = "crash"                // agents are killed and restart from their disks
	Reconnect           = "reconnect"            // all streams are cut
	RestartOrchestrator = "restart-orchestrator" // the orchestrator restarts, and all agents follow it again
	ChangePolicy        = "change-policy"        // a policy of the first tenant changes repeatedly
	ChangeEndpoint      = "change-endpoint"      // endpoints of the first tenant's services change repeatedly
)

// counted holds whether an event needs a number of nodes.
var counted = map[string]bool{
	Grow:                true,
	Shrink:              true,
	RestartJob:          true,
	Crash:               true,
	Reconnect:           false,
	RestartOrchestrator: false,
	ChangePolicy:        false,
	ChangeEndpoint:      false,
}

// repeated reports whether an event consists of changes of the first tenant.
func (e Event) repeated() bool { return e.Do == ChangePolicy || e.Do == ChangeEndpoint }

// Amount is a number of nodes, or a percentage of the existing nodes.
type Amount struct {
	N       int
	Percent bool
}

func (a *Amount) UnmarshalText(text []byte) (err error) {
	digits, percent := strings.CutSuffix(string(text), "%")
	if a.N, err = strconv.Atoi(digits); err != nil || a.N < 1 || percent && a.N > 1000 {
		return errors.New("write a number of nodes, such as 100, or a percentage, such as 10%")
	}
	a.Percent = percent
	return nil
}

func (a Amount) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

func (a Amount) String() string {
	if a.Percent {
		return fmt.Sprintf("%d%%", a.N)
	}
	return strconv.Itoa(a.N)
}

func (a Amount) of(nodes int) int {
	if a.Percent {
		return nodes * a.N / 100
	}
	return a.N
}

// Size is a number of bytes.
type Size int64

var sizeUnits = []struct {
	suffix string
	bytes  Size
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"", 1}}

func (s *Size) UnmarshalText(text []byte) error {
	for _, u := range sizeUnits {
		if digits, ok := strings.CutSuffix(string(text), u.suffix); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(digits), 10, 32)
			if err != nil || n < 1 {
				break
			}
			*s = Size(n) * u.bytes
			return nil
		}
	}
	return errors.New("write a size, such as 16GiB or 512MiB")
}

func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

func (s Size) String() string {
	for _, u := range sizeUnits {
		if s%u.bytes == 0 {
			return fmt.Sprintf("%d%s", s/u.bytes, u.suffix)
		}
	}
	return ""
}

// defaultCIDR is the CIDR of a tenant on a network with own CIDRs. IPv4 has virtual addresses for fewer nodes.
var defaultCIDR = netip.MustParsePrefix("fd10::/48")

const defaultNodeBits = tenant.DefaultNodeBits6

func (s Scenario) overlay() tenant.Overlay { return tenant.Overlay{CIDR: s.CIDR, NodeBits: s.NodeBits} }

// Bounds of scenarios' fields.
const (
	maxNodes   = 1_000_000
	maxTenants = 1_000
	maxTimes   = 10_000
	maxRate    = 1_000 // changes a second
)

// Read reads a scenario's YAML file. The file's name is the default name of the scenario.
func Read(path string) (Scenario, error) {
	b, err := specfile.Read("scenario", path)
	if err != nil {
		return Scenario{}, err
	}
	return Parse(path, b)
}

// Parse parses YAML. The file's name is the default name of the scenario. Errors name the file and the line.
func Parse(file string, b []byte) (Scenario, error) {
	s, f, err := specfile.Parse[Scenario](file, b)
	if err != nil {
		return Scenario{}, err
	}
	// An omitted field gets its default or has no limit, so an explicit 0 is an error.
	for path, zero := range s.zeros() {
		if zero && f.Has(path) {
			key := path[strings.LastIndexByte(path, '.')+1:]
			return Scenario{}, f.Wrong(&specfile.Error{Path: path, Text: key + ": use more than 0, or omit it"})
		}
	}
	s = s.Filled(strings.TrimSuffix(filepath.Base(file), filepath.Ext(file)))
	if err := s.Validate(); err != nil {
		return Scenario{}, f.Wrong(err)
	}
	return s, nil
}

// zeros lists the fields that must be more than 0 if they are present, by path. A value is true if the field is 0.
func (s Scenario) zeros() map[string]bool {
	all := map[string]bool{
		"$.activePeers": s.ActivePeers == 0, "$.tenants": s.Tenants == 0, "$.atOnce": s.AtOnce == 0,
		"$.services":    s.Services == 0,
		"$.limits.time": s.Limits.Time == 0, "$.limits.memory": s.Limits.Memory == 0,
		"$.limits.messages": s.Limits.Messages == 0,
	}
	for i, e := range s.Events {
		all[fmt.Sprintf("$.events[%d].within", i)] = e.Within == 0
		all[fmt.Sprintf("$.events[%d].times", i)] = e.Times == 0
		all[fmt.Sprintf("$.events[%d].perSecond", i)] = e.PerSecond == 0
	}
	return all
}

// Filled returns the scenario with defaults for omitted fields.
func (s Scenario) Filled(name string) Scenario {
	s.Name = cmp.Or(s.Name, name)
	s.Network = cmp.Or(s.Network, tenant.DefaultNetwork)
	if on, known := tenant.TraitsOf(s.Network); known && !on.Has(tenant.OwnCIDRs) {
		s.Addressing = cmp.Or(s.Addressing, on.Addressings[0])
	}
	if tenant.NetworkHas(s.Network, tenant.OwnCIDRs) {
		if !s.CIDR.IsValid() {
			s.CIDR = defaultCIDR
		}
		if !s.NoNodeCIDRs {
			s.NodeBits = cmp.Or(s.NodeBits, defaultNodeBits)
		}
		s.MappingsBy = cmp.Or(s.MappingsBy, ByStream)
	}
	s.Tenants = cmp.Or(s.Tenants, 1)
	s.AtOnce = cmp.Or(s.AtOnce, 512)
	s.Events = slices.Clone(s.Events)
	for i, e := range s.Events {
		if e.repeated() {
			s.Events[i].Times = cmp.Or(e.Times, 100)
		}
	}
	return s
}

// Validate reports the first invalid field of a scenario.
func (s Scenario) Validate() error {
	wrong := func(path, format string, args ...any) error {
		return &specfile.Error{Path: path, Text: fmt.Sprintf(format, args...)}
	}
	between := func(key string, value, least, most int) error {
		if value < least || value > most {
			return wrong("$."+key, "%s %d: use %d to %d", key, value, least, most)
		}
		return nil
	}
	positive := func(path string, limit time.Duration) error {
		if limit < 0 {
			return wrong(
				path,
				"%s %v: use more than 0, or omit it",
				path[strings.LastIndexByte(path, '.')+1:],
				limit,
			)
		}
		return nil
	}
	if err := cmp.Or(
		between("nodes", s.Nodes, 1, maxNodes),
		between("containersPerNode", s.ContainersPerNode, 0, dpapi.DefaultMaxEndpoints),
		between("tenants", s.Tenants, 1, maxTenants),
		between("activePeers", s.ActivePeers, 0, maxNodes),
		between("atOnce", s.AtOnce, 1, maxNodes),
		between("listRate", s.ListRate, 0, maxNodes),
		between("services", s.Services, 0, service.MaxServices/max(s.Tenants, 1)),
		positive("$.limits.time", s.Limits.Time),
	); err != nil {
		return err
	}
	if s.Limits.Messages < 0 {
		return wrong("$.limits.messages", "messages %d: use more than 0, or omit it", s.Limits.Messages)
	}
	if s.ActivePeers > 0 && !tenant.NetworkHas(s.Network, tenant.Identifiers) {
		return wrong("$.activePeers", "activePeers is for network %s; on %s nodes do not subscribe to mappings",
			tenant.NetworksWith(tenant.Identifiers), s.Network)
	}
	if s.Services > 0 && !tenant.NetworkHas(s.Network, tenant.Services) {
		return wrong("$.services", "services is for network %s", tenant.NetworksWith(tenant.Services))
	}
	with, without := tenant.NetworksWith(tenant.OwnCIDRs), tenant.NetworksWithout(tenant.OwnCIDRs)
	switch on, known := tenant.TraitsOf(s.Network); {
	case !known:
		return wrong("$.network", "network %q: use %s", s.Network, tenant.OneOf(tenant.Networks()))
	case !on.Has(tenant.OwnCIDRs):
		if s.ListRate != 0 && !on.Has(tenant.Mappings) {
			return wrong(
				"$.listRate",
				"listRate is for network %s; on %s nodes do not query mappings",
				tenant.NetworksWith(tenant.Mappings),
				on.Name,
			)
		}
		if !slices.Contains(on.Addressings, s.Addressing) {
			return wrong("$.addressing", "addressing %q: use %s", s.Addressing, tenant.OneOf(on.AddressingNames()))
		}
		if s.CIDR.IsValid() || s.NodeBits != 0 || s.NoNodeCIDRs || s.MappingsBy != "" {
			return wrong(
				"$",
				"cidr, nodeBits, noNodeCIDRs and mappingsBy are for network %s; %s chooses the addresses itself",
				with,
				on.Name,
			)
		}
	default:
		if s.Addressing != "" {
			return wrong(
				"$.addressing",
				"addressing is for network %s; on %s containers have addresses of the tenant's own",
				without,
				on.Name,
			)
		}
		if s.NoNodeCIDRs && s.NodeBits != 0 {
			return wrong("$.nodeBits", "nodeBits needs nodes with subnets, and noNodeCIDRs disables those")
		}
		if s.MappingsBy != ByStream && (s.MappingsBy != ByQuery || s.NoNodeCIDRs) {
			return wrong(
				"$.mappingsBy",
				"mappingsBy %q: use %s, or, if nodes have subnets, %s",
				s.MappingsBy,
				ByStream,
				ByQuery,
			)
		}
		if err := tenant.CheckOverlays(address.DefaultPlan(), []tenant.Overlay{s.overlay()}); err != nil {
			return wrong("$.cidr", "%v", err)
		}
	}
	nodes, most := s.Nodes, s.Nodes
	for i, e := range s.Events {
		at := fmt.Sprintf("$.events[%d]", i)
		needs, known := counted[e.Do]
		switch {
		case !known:
			return wrong(at+".do", "event %q: use %s", e.Do, strings.Join(kinds(), ", "))
		case needs && e.By == Amount{}:
			return wrong(at, "event %s needs a number of nodes: write by: 10%%, or by: 100", e.Do)
		case !needs && e.By != Amount{}:
			return wrong(at+".by", "event %s affects all nodes; leave by out", e.Do)
		case e.ListFirst && (e.Do != Grow || s.NodeBits == 0):
			return wrong(
				at+".listFirst",
				"listFirst is for event %s on network %s, with subnets of nodes",
				Grow,
				tenant.NetworksWith(tenant.Mappings),
			)
		case e.Times != 0 && !e.repeated():
			return wrong(at+".times", "times is for event %s or %s", ChangePolicy, ChangeEndpoint)
		case e.repeated() && (e.Times < 1 || e.Times > maxTimes):
			return wrong(at+".times", "times %d: use 1 to %d", e.Times, maxTimes)
		case e.repeated() && s.ContainersPerNode == 0:
			return wrong(at+".do", "event %s needs nodes with containers: set containersPerNode", e.Do)
		case e.PerSecond != 0 && e.Do != ChangeEndpoint:
			return wrong(at+".perSecond", "perSecond is for event %s", ChangeEndpoint)
		case e.PerSecond < 0 || e.PerSecond > maxRate:
			return wrong(at+".perSecond", "perSecond %d: use 1 to %d, or omit it", e.PerSecond, maxRate)
		case e.Do == ChangeEndpoint && s.Services == 0:
			return wrong(at+".do", "event %s needs services: set services", e.Do)
		case needs && e.By.of(nodes) < 1:
			return wrong(at+".by", "event %v: %v of %d nodes is less than one node", e, e.By, nodes)
		}
		if err := positive(at+".within", e.Within); err != nil {
			return err
		}
		switch n := e.By.of(nodes); {
		case e.Do == Grow && nodes+n > maxNodes:
			return wrong(at+".by", "event %v: %d nodes and %d more: the maximum is %d", e, nodes, n, maxNodes)
		case e.Do == Grow:
			nodes += n
		case e.Do == Shrink && n >= nodes:
			return wrong(at+".by", "event %v: %d of %d nodes: at least one must remain", e, n, nodes)
		case e.Do == Shrink:
			nodes -= n
		case needs && n > nodes:
			return wrong(at+".by", "event %v: %d of %d nodes: there are too few", e, n, nodes)
		}
		most = max(most, nodes)
	}
	// Events may add spare containers.
	if n := (most*s.ContainersPerNode + spareContainers) * s.Services; n > service.MaxEndpoints {
		return wrong("$.services", "services %d: %d endpoints for up to %d nodes: the maximum of a cluster is %d",
			s.Services, n, most, service.MaxEndpoints)
	}
	return nil
}

func kinds() []string {
	var all []string
	for kind := range counted {
		all = append(all, kind)
	}
	slices.Sort(all)
	return all
}
