package cli

import (
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// tenantView is a tenant as JSON.
type tenantView struct {
	Name             string                `json:"name"`
	Network          string                `json:"network"`
	Addressing       tenant.Addressing     `json:"addressing"`
	Overlays         []overlayView         `json:"overlays,omitzero"` // of a network with own CIDRs
	Regions          []elsewhereView       `json:"regions,omitzero"`  // other regions with the tenant
	UnderlayServices []underlayServiceView `json:"services,omitzero"`
	Published        []publicationView     `json:"publications,omitzero"`
	Egress           []egressView          `json:"egress,omitzero"`
	Reaches          []string              `json:"reachesNodes,omitzero"` // prefixes of nodes
	IDs              []tenantIDView        `json:"ids"`                   // in the order of creation
	Created          time.Time             `json:"created"`
	Apps             []appView             `json:"apps,omitzero"` // of tenant get
	AppNumbers       *appNumbersView       `json:"appNumbers,omitempty"`
	Nodes            []hostView            `json:"nodes,omitzero"` // of tenant get: nodes that host it
	Leaving          *leavingView          `json:"leaving,omitempty"`
	// of tenant get: nodes that do not enforce its current policies
	Unenforced []unenforcedView `json:"unenforced,omitzero"`
}

type unenforcedView struct {
	Node    string `json:"node"`
	Problem string `json:"problem"`
}

func viewUnenforced(hosting []*pilasterv1.Hosting) (all []unenforcedView) {
	for _, h := range hosting {
		if h.Unenforced != "" {
			all = append(all, unenforcedView{h.Node, h.Unenforced})
		}
	}
	return all
}

type appView struct {
	ID     uint32            `json:"id"`
	Labels map[string]string `json:"labels"`
}

// appNumbersView is the number of app ids that a tenant uses, and the maximum. Only tenant get sets it.
type appNumbersView struct {
	Used       int      `json:"used"`
	Capacity   uint32   `json:"capacity"`
	Retiring   int      `json:"retiring"`            // of Used: retired when all nodes report that no container has them
	WaitingFor []string `json:"waitingFor,omitzero"` // nodes that have not reported whether a container has them
	Resting    uint32   `json:"resting"`             // quarantined for some minutes
}

func viewAppNumbers(r *pilasterv1.GetTenantResponse) *appNumbersView {
	v := &appNumbersView{
		Used:     len(r.Apps),
		Capacity: r.MaxApps,
		Retiring: len(r.Tenant.GetRetiringApps().GetApps()),
		Resting:  r.RestingApps,
	}
	if round := r.Tenant.GetRetiringApps(); round != nil {
		v.WaitingFor = []string{}
		for _, h := range r.Hosting {
			if h.HeardRound != round.Round {
				v.WaitingFor = append(v.WaitingFor, describeNodes([]hostView{{h.Node, h.Connected}}))
			}
		}
	}
	return v
}

func (v *appNumbersView) describe() string {
	words := fmt.Sprintf("%d of %d", v.Used, v.Capacity)
	if v.Retiring > 0 {
		words += fmt.Sprintf(", %d of them are retired unless a container has them", v.Retiring)
	}
	if len(v.WaitingFor) > 0 {
		words += " (no report yet from " + strings.Join(v.WaitingFor, ", ") + ")"
	}
	if v.Resting > 0 {
		words += fmt.Sprintf("; %d more are quarantined for some minutes", v.Resting)
	}
	return words
}

// overlayView is a CIDR of a tenant's own.
type overlayView struct {
	CIDR     string `json:"cidr"`
	NodeBits uint32 `json:"nodeBits,omitempty"` // 0: addresses are allocated one by one
	Given    uint64 `json:"given"`              // allocated subnets or addresses
	Capacity uint64 `json:"capacity"`
}

// elsewhereView is a tenant in another region.
type elsewhereView struct {
	Name     string   `json:"name"`
	CIDRs    []string `json:"cidrs"`
	Edge     string   `json:"edge"` // prefix of this region's Edge Switch
	PeerEdge string   `json:"peerEdge"`
	PeerVNI  uint32   `json:"peerVni"`
}

func viewTenant(t *pilasterv1.Tenant) tenantView {
	v := tenantView{
		Name:       t.Name,
		Network:    cmp.Or(t.Network, tenant.DefaultNetwork),
		Addressing: tenant.Encrypted,
		Created:    t.Created.AsTime(),
	}
	switch t.Addressing {
	case pilasterv1.Addressing_ADDRESSING_CLEAR:
		v.Addressing = tenant.Clear
	case pilasterv1.Addressing_ADDRESSING_OWN:
		v.Addressing = tenant.Own
	}
	for _, o := range t.Overlays {
		view := overlayView{CIDR: o.Cidr, NodeBits: o.NodeBits, Given: o.Given}
		if cidr, err := netip.ParsePrefix(o.Cidr); err == nil {
			_, view.Capacity = tenant.Overlay{CIDR: cidr, NodeBits: int(o.NodeBits)}.Given()
		}
		v.Overlays = append(v.Overlays, view)
	}
	for _, r := range t.Regions {
		v.Regions = append(v.Regions, elsewhereView{r.Name, r.Cidrs, r.Edge, r.PeerEdge, r.PeerVni})
	}
	for _, is := range t.UnderlayServices {
		v.UnderlayServices = append(v.UnderlayServices, viewUnderlayService(is))
	}
	for _, p := range t.Publications {
		v.Published = append(v.Published, viewPublication(p))
	}
	v.Egress, v.Reaches = viewEgress("", t.Egress), t.NodePrefixes
	v.IDs = viewIDs(t.Ids)
	return v
}

func (v tenantView) ids() string {
	var ids []string
	for _, id := range v.IDs {
		ids = append(ids, fmt.Sprint(id.ID))
	}
	return strings.Join(ids, ",")
}

func (o overlayView) describe() string {
	what := "addresses"
	if o.NodeBits != 0 {
		what = fmt.Sprintf("node subnets /%d", o.NodeBits)
	}
	return fmt.Sprintf("%d of %d %s allocated", o.Given, o.Capacity, what)
}

func (v tenantView) cidrs() string {
	var cidrs []string
	for _, o := range v.Overlays {
		cidrs = append(cidrs, fmt.Sprintf("%s (%d/%d)", o.CIDR, o.Given, o.Capacity))
	}
	return cmp.Or(strings.Join(cidrs, ", "), "-")
}

// describe says how the tenant's containers get their addresses.
func (v tenantView) describe() string {
	if len(v.Overlays) == 0 {
		return string(v.Addressing)
	}
	var cidrs []string
	for _, o := range v.Overlays {
		cidrs = append(cidrs, o.CIDR)
		if o.NodeBits != 0 {
			cidrs[len(cidrs)-1] += fmt.Sprintf(" (a /%d each node)", o.NodeBits)
		}
	}
	return fmt.Sprintf("network %s, %s", v.Network, strings.Join(cidrs, ", "))
}

func printTenant(w io.Writer, v tenantView) {
	fmt.Fprintf(
		w,
		"name\t%s\nnetwork\t%s\naddressing\t%s\ncreated\t%s\n",
		v.Name,
		v.Network,
		v.Addressing,
		moment(v.Created),
	)
	if v.Leaving != nil {
		fmt.Fprintf(w, "leaving\t%s\t%s\n", orNone(v.Leaving.Network), v.Leaving.describe(v.Network))
		for _, late := range v.Leaving.late() {
			fmt.Fprintf(w, "not yet\t%s\n", late)
		}
	}
	for _, o := range v.Overlays {
		fmt.Fprintf(w, "cidr\t%s\t%s\n", o.CIDR, o.describe())
	}
	for _, r := range v.Regions {
		fmt.Fprintf(
			w,
			"region\t%s\t%s, VNI %d, by Edge Switch %s\n",
			r.Name,
			strings.Join(r.CIDRs, ", "),
			r.PeerVNI,
			r.PeerEdge,
		)
	}
	for _, is := range v.UnderlayServices {
		fmt.Fprintf(w, "underlay service\t%s\t%s, real address %s\n", is.Name, is.Virtual, is.Real)
	}
	for _, p := range v.Published {
		fmt.Fprintf(w, "publication\t%s\t%s on node %s, container %s\n", p.Name, p.Underlay, p.Node, p.Container)
	}
	for _, r := range v.Egress {
		fmt.Fprintf(w, "egress\t%s\t%s\n", r.To, r.describe())
	}
	for _, p := range v.Reaches {
		fmt.Fprintf(w, "reaches\tnodes in %s\n", p)
	}
	for _, id := range v.IDs {
		fmt.Fprintf(w, "id\t%d\t%s\n", id.ID, id.describe())
	}
	for _, u := range v.Unenforced {
		fmt.Fprintf(
			w,
			"policies\t%s\tdoes not enforce the current ones (it enforces the previous ones, or isolates the "+
				"containers): %s\n",
			u.Node,
			u.Problem,
		)
	}
	if v.AppNumbers != nil && v.AppNumbers.Capacity > 0 { // earlier builds of the orchestrator do not report it
		fmt.Fprintf(w, "apps\t%s\n", v.AppNumbers.describe())
	}
	for _, a := range v.Apps {
		fmt.Fprintf(w, "app\t%d\t%s\n", a.ID, cmp.Or(tenant.Canonical(a.Labels), "without labels"))
	}
	fmt.Fprintf(w, "nodes\t%s\n", orNone(describeNodes(v.Nodes)))
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
