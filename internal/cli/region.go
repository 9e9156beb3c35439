package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// regionView is a region as JSON. export writes this format and import reads it.
type regionView struct {
	Version    int                `json:"version,omitempty"` // of the format; only in exports
	Name       string             `json:"name"`
	BasePrefix string             `json:"basePrefix"`
	Edge       string             `json:"edge"` // prefix of its Edge Switch; empty without one
	Tenants    []regionTenantView `json:"tenants"`
	LeftOut    []string           `json:"leftOut,omitempty"` // of import: tenants in the file that were not connected
}

type regionTenantView struct {
	Name  string   `json:"name"`
	VNI   uint32   `json:"vni"`
	CIDRs []string `json:"cidrs"`

	Created time.Time `json:"created,omitzero"` // distinguishes the tenant from other tenants with the same name
	// of other regions: the state of the tenant in this region; not in exports
	Here string `json:"here,omitempty"`
}

// regionsView is the output of list.
type regionsView struct {
	Own     regionView   `json:"own"`
	Regions []regionView `json:"regions"`
}

// regionVersion is the version of the format that export writes. Version 1 has no creation times of tenants. Builds
// that support only version 1 reject version 2.
const regionVersion = 2

func viewRegion(r *pilasterv1.Region) regionView {
	v := regionView{Name: r.GetName(), BasePrefix: r.GetBasePrefix(), Edge: r.GetEdge(), Tenants: []regionTenantView{}}
	for _, t := range r.GetTenants() {
		is := regionTenantView{Name: t.Name, VNI: t.Vni, CIDRs: t.Cidrs}
		if t.Created != nil {
			is.Created = t.Created.AsTime()
		}
		v.Tenants = append(v.Tenants, is)
	}
	return v
}

func (v regionView) proto() *pilasterv1.Region {
	r := &pilasterv1.Region{Name: v.Name, BasePrefix: v.BasePrefix, Edge: v.Edge}
	for _, t := range v.Tenants {
		is := &pilasterv1.Region_Tenant{Name: t.Name, Vni: t.VNI, Cidrs: t.CIDRs}
		if !t.Created.IsZero() {
			is.Created = timestamppb.New(t.Created)
		}
		r.Tenants = append(r.Tenants, is)
	}
	return r
}

func (v regionView) tenants() string {
	var names []string
	for _, t := range v.Tenants {
		name := t.Name
		if t.Here != "" && t.Here != joined {
			name += " (" + t.Here + ")"
		}
		names = append(names, name)
	}
	return orNone(strings.Join(names, ", "))
}

func newRegionCommand(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "region",
		Short: "Connect regions, so that tenants of network " + tenant.NetworksWith(tenant.Regions) + " can span them",
		Long: `Connect regions, so that tenants of network ` + tenant.NetworksWith(tenant.Regions) + ` can span them.

A region is an orchestrator with its nodes. Tenants with the same name in two regions are one tenant;
their CIDRs must not overlap. A packet goes from the node to the Edge Switch of its region (pilaster
agent --edge), to the Edge Switch of the other region, and to the destination's node. Each orchestrator
stores what the other region exported. After a change, export and import again.`,
		Example: "  pilaster region export > west.json     # in region west\n  pilaster region import west.json      " +
			" # in region east, and the other way round\n  pilaster region list",
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(newRegionExport(env), newRegionImport(env), newRegionList(env), newRegionDelete(env))
	return cmd
}

func newRegionExport(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Write the description of this region for other regions",
		Long: `Write the description of this region for other regions: its name and base prefix, the /64 of its Edge
Switch, and name, VNI and CIDRs of its tenants of network ` +
			tenant.NetworksWith(tenant.Regions) + `. It contains no keys.`,
		Example: "  pilaster region export > west.json\n  pilaster region export -o text",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().
				ExportRegion(cmd.Context(), connect.NewRequest(&pilasterv1.ExportRegionRequest{}))
			if err != nil {
				return err
			}
			v := viewRegion(resp.Msg.Region)
			v.Version = regionVersion
			return out.print(env.Stdout, v, v.print)
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	out.format = "json" // import reads JSON
	cmd.Flags().Lookup("output").DefValue = out.format
	return cmd
}

func (v regionView) print(w io.Writer) {
	fmt.Fprintf(w, "region\t%s\nbase prefix\t%s\nedge\t%s\n", v.Name, v.BasePrefix, orNone(v.Edge))
	for _, t := range v.Tenants {
		fmt.Fprintf(w, "tenant\t%s\tVNI %d\t%s", t.Name, t.VNI, strings.Join(t.CIDRs, ", "))
		if t.Here != "" {
			fmt.Fprintf(w, "\t%s", t.Here)
		}
		fmt.Fprintln(w)
	}
	if len(v.LeftOut) > 0 {
		fmt.Fprintf(w, "left out\t%s\n", strings.Join(v.LeftOut, ", "))
	}
}

func newRegionImport(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenants []string
	var all bool
	cmd := &cobra.Command{
		Use:   "import FILE",
		Short: "Import or update another region from its export",
		Long: `Import or update another region from its export ("-" reads standard input). The command checks the whole
file and changes nothing if a check fails: the base prefix must not overlap this region's, a tenant's
CIDRs must not overlap those that it has here, and this region must have an Edge Switch. A new import of
a region replaces the previous one.

The first import connects all tenants, or those in --tenant. A later import keeps that choice and lists
the tenants that it left out, so tenants that are new in the other region are not connected
automatically. To connect more, list all of them with --tenant, or use --all for all that the file
contains.

Tenants that do not exist here yet are connected when they are created. This includes a tenant that is
deleted and created again before the next import. Any other tenant that was deleted and created again
after an import, here or there, counts as a different tenant: the next import must name it with --tenant
or use --all, otherwise it is refused.`,
		Example: "  pilaster region import east.json\n  pilaster region import east.json --tenant blue --tenant " +
			"red\n  pilaster region import east.json --all",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("tenant") && len(tenants) == 0 {
				return usage("--tenant is empty; omit it, or name tenants")
			}
			v, err := readRegion(env, args[0])
			if err != nil {
				return err
			}
			resp, err := socket.client().
				ImportRegion(cmd.Context(),
					connect.NewRequest(&pilasterv1.ImportRegionRequest{Region: v.proto(), Tenants: tenants, All: all}))
			if err != nil {
				return err
			}
			file := v
			here, err := socket.client().
				ListTenants(cmd.Context(), connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
			if err != nil {
				return err
			}
			v = viewRegion(resp.Msg.Region)
			v.find(here.Msg.Tenants, true)
			v.LeftOut = file.without(v)
			return out.print(env.Stdout, v, v.print)
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	cmd.Flags().
		StringSliceVar(&tenants, "tenant", nil,
			"connect only these tenants (default: those of the previous import; all "+
				"in the first)")
	cmd.Flags().BoolVar(&all, "all", false, "connect all of its tenants")
	cmd.MarkFlagsMutuallyExclusive("tenant", "all")
	_ = cmd.RegisterFlagCompletionFunc(
		"tenant",
		func(c *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return names(socket.tenants)(c, nil, typed)
		},
	)
	return cmd
}

func readRegion(env Env, file string) (v regionView, err error) {
	var text []byte
	if file == "-" {
		text, err = io.ReadAll(env.Stdin)
	} else {
		text, err = os.ReadFile(file)
	}
	if err != nil {
		return v, usage("%w", err)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil || v.Version == 0 {
		return v, usage("%s is not a file of `pilaster region export`; nothing was changed", file)
	}
	if v.Version < 1 || v.Version > regionVersion {
		return v, usage(
			"%s has format version %d, but this program supports 1 to %d; nothing was changed; use the pilaster "+
				"that wrote it",
			file,
			v.Version,
			regionVersion,
		)
	}
	return v, nil
}

// without returns the names of the tenants that are not in another view of the region.
func (v regionView) without(other regionView) (names []string) {
	for _, t := range v.Tenants {
		if !slices.ContainsFunc(other.Tenants, func(o regionTenantView) bool { return o.Name == t.Name }) {
			names = append(names, t.Name)
		}
	}
	return names
}

const joined = "joined"

// find sets Here of each tenant. edge reports whether this region has an Edge Switch.
func (v regionView) find(here []*pilasterv1.Tenant, edge bool) {
	for i, t := range v.Tenants {
		v.Tenants[i].Here = "not in this region"
		for _, own := range here {
			if own.Name == t.Name {
				v.Tenants[i].Here = v.joins(own, edge)
			}
		}
	}
}

// joins describes whether a tenant of this region is connected to the tenant with the same name in another region.
func (v regionView) joins(own *pilasterv1.Tenant, edge bool) string {
	switch {
	case slices.ContainsFunc(own.Regions, func(r *pilasterv1.TenantRegion) bool { return r.Name == v.Name }):
		return joined
	case len(own.Overlays) == 0:
		return "not joined: on network " + cmp.Or(own.Network, tenant.DefaultNetwork) + " here"
	case !edge:
		return "not joined: no Edge Switch here"
	}
	return "not joined: created again here since the import"
}

func newRegionList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show this region and the imported ones",
		Example: "  pilaster region list\n  pilaster region list -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().
				ListRegions(cmd.Context(), connect.NewRequest(&pilasterv1.ListRegionsRequest{}))
			if err != nil {
				return err
			}
			v := regionsView{viewRegion(resp.Msg.Own), []regionView{}}
			here, err := socket.client().
				ListTenants(cmd.Context(), connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
			if err != nil {
				return err
			}
			for _, r := range resp.Msg.Regions {
				is := viewRegion(r)
				is.find(here.Msg.Tenants, v.Own.Edge != "")
				v.Regions = append(v.Regions, is)
			}
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintln(w, "REGION\tBASE PREFIX\tEDGE\tTENANTS")
				own := v.Own
				own.Name = strings.TrimSpace(own.Name + " (here)")
				for _, r := range append([]regionView{own}, v.Regions...) {
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", r.Name, r.BasePrefix, orNone(r.Edge), r.tenants())
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	return cmd
}

func newRegionDelete(env Env) *cobra.Command {
	var socket orchestratorSocket
	cmd := &cobra.Command{
		Use:   "delete NAME",
		Short: "Disconnect another region; its containers and those here no longer reach each other",
		Long: `Disconnect another region; its containers and those here no longer reach each other. The other region
continues to send packets until it deletes this region too; this region's Edge Switch drops them.

A disconnected Edge Switch is not notified: it forwards packets of both regions until it reconnects, is
reset or is powered off.`,
		Example: "  pilaster region delete east",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			nodes, err := socket.client().ListNodes(cmd.Context(), connect.NewRequest(&pilasterv1.ListNodesRequest{}))
			if err != nil {
				return err
			}
			if _, err := socket.client().DeleteRegion(cmd.Context(),
				connect.NewRequest(&pilasterv1.DeleteRegionRequest{Name: args[0]})); err != nil {
				return err
			}
			fmt.Fprintf(env.Stdout, "region %s deleted\n", args[0])
			for _, n := range nodes.Msg.Nodes {
				if n.Edge && !n.Connected {
					fmt.Fprintf(
						env.Stdout,
						"Edge Switch %s is disconnected and was not notified: it continues to forward until it "+
							"reconnects, is reset (run `pilaster node reset` there) or is powered off\n",
						n.Name,
					)
				}
			}
			return nil
		},
	}
	socket.bind(cmd)
	cmd.ValidArgsFunction = names(socket.regions)
	return cmd
}
