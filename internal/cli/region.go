package cli

import (
	"bytes"
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
)

// regionView is a region as JSON: also what export writes and import reads.
type regionView struct {
	Version    int                `json:"version,omitempty"` // of the format, in what is exported
	Name       string             `json:"name"`
	BasePrefix string             `json:"basePrefix"`
	Edge       string             `json:"edge"` // prefix of its Edge Switch; empty where there is none
	Tenants    []regionTenantView `json:"tenants"`
	LeftOut    []string           `json:"leftOut,omitempty"` // of import: tenants in the file that were not taken
}

type regionTenantView struct {
	Name  string   `json:"name"`
	VNI   uint32   `json:"vni"`
	CIDRs []string `json:"cidrs"`

	Created time.Time `json:"created,omitzero"` // tells it from others of its name
	// of another region's, but in what is exported: what there is of the tenant in this one
	Here string `json:"here,omitempty"`
}

// regionsView is what list shows.
type regionsView struct {
	Own     regionView   `json:"own"`
	Regions []regionView `json:"regions"`
}

// regionVersion is of what export writes. Version 1 does not say when tenants were made, and builds that know it alone
// refuse to read that.
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
		Short: "Join regions, so that tenants of network nimitz that are in both are one",
		Long: `Join regions, so that tenants of network nimitz that are in both are one.

A region is an orchestrator with its nodes. Tenants with the same name in two regions are one tenant, with CIDRs that
do not overlap. Its packets go from a node to its region's Edge Switch (pilaster agent --edge), to the other region's, and
on to the container's node. Each orchestrator keeps what the other exported; import again what has changed since.`,
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
		Short: "Write what other regions must know of this one",
		Long: `Write what other regions must know of this one: its name and base prefix, the /64 of its Edge Switch, and name, VNI and
CIDRs of its tenants of network nimitz. Keys are not in it.`,
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
	out.format = "json" // to be imported
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
		Short: "Take another region in, or what is new of one, by what it exported",
		Long: `Take another region in, or what is new of one, by what it exported ("-" reads standard input). The file is checked whole, and
nothing is changed where anything of it does not fit: its base prefix must not overlap this region's, CIDRs of a tenant must not
overlap those it has here, and this region must have an Edge Switch. What was imported of the region before is replaced.

The first import takes all tenants, or those that --tenant names. A later one takes those again, and says which others it left
out: nobody is joined because the other region has made more. To take more name all that are wanted by --tenant, or take --all
that there are now.

Tenants that are not here yet are joined when they are made, also one that is deleted again and made anew before the next
import. Any other that was deleted and made anew since an import, here or there, is another tenant: it is joined when an import
names it by --tenant, or takes --all, and until then an import without them is refused.`,
		Example: "  pilaster region import east.json\n  pilaster region import east.json --tenant blue --tenant " +
			"red\n  pilaster region import east.json --all",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("tenant") && len(tenants) == 0 {
				return usage("--tenant is empty; leave it out, or name some")
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
		StringSliceVar(&tenants, "tenant", nil, "only these of its tenants (default those of the import before; all "+
			"the first time)")
	cmd.Flags().BoolVar(&all, "all", false, "all of its tenants, whatever was taken before")
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
		return v, usage("%s is not what `pilaster region export` writes; nothing was changed", file)
	}
	if v.Version < 1 || v.Version > regionVersion {
		return v, usage(
			"%s has version %d of the format, and this program knows 1 to %d; nothing was changed: use the pilaster "+
				"that wrote it",
			file,
			v.Version,
			regionVersion,
		)
	}
	return v, nil
}

// without are the tenants that another view of the region lacks.
func (v regionView) without(other regionView) (names []string) {
	for _, t := range v.Tenants {
		if !slices.ContainsFunc(other.Tenants, func(o regionTenantView) bool { return o.Name == t.Name }) {
			names = append(names, t.Name)
		}
	}
	return names
}

const joined = "joined"

// find says what there is here of each tenant, where there is an Edge Switch or not.
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

// joins says whether a tenant of this region is joined to the one of its name in another.
func (v regionView) joins(own *pilasterv1.Tenant, edge bool) string {
	switch {
	case slices.ContainsFunc(own.Regions, func(r *pilasterv1.TenantRegion) bool { return r.Name == v.Name }):
		return joined
	case len(own.Overlays) == 0:
		return "on network netpila here, not joined"
	case !edge:
		return "not joined without an Edge Switch here"
	}
	return "made anew here since the import, not joined"
}

func newRegionList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show this region and the others it knows",
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
		Short: "Forget another region; its containers and those here no longer reach each other",
		Long: `Forget another region; its containers and those here no longer reach each other. The other one goes on
sending until it forgets this one too, and this region's Edge Switch drops that.

An Edge Switch that is away does not hear of it: it goes on passing packets of both until it is back, or is reset or powered off.`,
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
						"Edge Switch %s is away and has not heard of it: it goes on until it is back, or is reset "+
							"(`pilaster node reset` there) or powered off\n",
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
