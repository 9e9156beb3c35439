package paper

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/plot"
)

// Figure is one of the paper's, drawn again.
type Figure struct {
	ID       string  `json:"id"` // fig9, table1
	Title    string  `json:"title"`
	Claims   string  `json:"claims"` // sections, and the ids of claims
	Nature   string  `json:"nature"` // simulated, a model, measured
	Origin   Origin  `json:"origin"`
	Seconds  float64 `json:"seconds"`          // that it took; what another figure of the run had measured already took none
	Failed   string  `json:"failed,omitempty"` // why there is nothing else
	Sizes    string  `json:"sizes,omitempty"`
	Ran      string  `json:"ran,omitempty"`     // what was run here
	Differs  string  `json:"differs,omitempty"` // why it is not as in the paper
	Rows     []Row   `json:"rows,omitempty"`
	Panels   []Panel `json:"panels,omitempty"`
	Scenario any     `json:"scenario,omitempty"` // what it was run with
}

// Origin is where and when a figure was drawn.
type Origin struct {
	Form    string    `json:"form"`
	Version string    `json:"version"`
	Commit  string    `json:"commit"`
	CPUs    int       `json:"cpus"`
	Kernel  string    `json:"kernel"`
	Date    time.Time `json:"date"`
}

func (o Origin) String() string {
	return fmt.Sprintf(
		"form %s · commit %s, version %s · %d CPUs, Linux %s · %s",
		o.Form,
		o.Commit,
		o.Version,
		o.CPUs,
		o.Kernel,
		o.Date.Format(time.RFC3339),
	)
}

// Row is a figure in words.
type Row struct {
	What  string `json:"what"`
	Here  string `json:"here,omitempty"`  // empty: not measured
	Paper string `json:"paper,omitempty"` // empty: its text has none
	Where string `json:"where,omitempty"` // in the paper
}

// Panel is one drawing.
type Panel struct {
	Title  string   `json:"title"`
	X      string   `json:"x"`
	Y      string   `json:"y"`
	Log    bool     `json:"logarithmic,omitempty"`
	Series []Series `json:"series"`
}

// Whose a series is.
const (
	ours       = "here"
	theirs     = "paper" // read off its text
	arithmetic = "sum"   // the paper's arithmetic at other sizes
)

// Series is what a line has.
type Series struct {
	Name   string       `json:"name"`
	Of     string       `json:"of"` // here, paper, sum
	Where  string       `json:"where,omitempty"`
	Apart  bool         `json:"apart,omitempty"` // no line between the points
	Points [][2]float64 `json:"points"`
}

// read is a series of the paper's text.
func read(where, name string, points ...[2]float64) Series {
	return Series{Name: name, Of: theirs, Where: where + ", read off the text", Apart: true, Points: points}
}

// marked is a number of the paper's text along an axis.
func marked(where, name string, from, to [2]float64) Series {
	s := read(where, name, from, to)
	s.Apart = false
	return s
}

// chart places a panel.
func (p Panel) chart(nature string) *plot.Lines {
	drawn := plot.Plot{Title: p.Title, X: p.X, Y: p.Y, Log: p.Log}
	for _, s := range p.Series {
		name := s.Of + ": " + s.Name
		if s.Of == theirs {
			where, _, _ := strings.Cut(s.Where, ",")
			name += ", " + where
		}
		drawn.Lines = append(drawn.Lines, plot.Line{Name: name, Apart: s.Apart, Points: s.Points})
	}
	return plot.NewLines(nature+":", drawn)
}

// Charts are the panels as drawings.
func (f Figure) Charts() (all []*plot.Lines) {
	for _, p := range f.Panels {
		all = append(all, p.chart(f.Nature))
	}
	return all
}

// TSV writes the points; or the rows, where nothing is drawn. Lines with # say what it is.
func (f Figure) TSV(w io.Writer) {
	fmt.Fprintf(w, "# %s: %s (%s)\n# %s; %s\n", f.ID, f.Title, f.Claims, f.Nature, f.Origin)
	if f.Failed != "" {
		fmt.Fprintf(w, "# failed: %s\n", f.Failed)
		return
	}
	fmt.Fprintf(w, "# sizes: %s\n# run: %s\n# scenario: in %s.json\n", f.Sizes, f.Ran, f.ID)
	if len(f.Panels) == 0 {
		fmt.Fprint(w, "what\there\tpaper\twhere\n")
		for _, r := range f.Rows {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", r.What, r.Here, r.Paper, r.Where)
		}
		return
	}
	fmt.Fprint(w, "drawing\tof\tseries\twhere\tx\ty\n")
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', 9, 64) }
	for _, p := range f.Panels {
		for _, s := range p.Series {
			for _, at := range s.Points {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", p.Title, s.Of, s.Name, s.Where, number(at[0]), number(at[1]))
			}
		}
	}
}

// Table writes the figure for a terminal; columns are separated by tabs.
func (f Figure) Table(w io.Writer) {
	fmt.Fprintf(w, "\n%s: %s (%s; %s)\n", f.ID, f.Title, f.Nature, f.Claims)
	if f.Failed != "" {
		fmt.Fprintf(w, "  failed: %s\n", f.Failed)
		return
	}
	fmt.Fprintf(w, "  sizes: %s\n  %s\n  %s\n", f.Sizes, f.Ran, f.Differs)
	f.table().Text(w, "  ")
}

func (f Figure) table() *plot.Table {
	t := &plot.Table{Head: []string{"WHAT", "HERE", "PAPER", "WHERE"}}
	for _, r := range f.Rows {
		t.Rows = append(t.Rows, []string{r.What, cmp.Or(r.Here, "–"), cmp.Or(r.Paper, "–"), r.Where})
	}
	return t
}
