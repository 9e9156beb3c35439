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

// Figure is one of the paper's figures, plotted again.
type Figure struct {
	ID       string  `json:"id"` // fig9, table1
	Title    string  `json:"title"`
	Claims   string  `json:"claims"` // sections of the paper, and IDs of claims
	Nature   string  `json:"nature"` // simulated, a model, measured
	Origin   Origin  `json:"origin"`
	Seconds  float64 `json:"seconds"`          // duration; measurements for an earlier figure of the run count as zero
	Failed   string  `json:"failed,omitempty"` // error; the rest is empty then
	Sizes    string  `json:"sizes,omitempty"`
	Ran      string  `json:"ran,omitempty"`     // description of the measurement
	Differs  string  `json:"differs,omitempty"` // differences from the paper
	Rows     []Row   `json:"rows,omitempty"`
	Panels   []Panel `json:"panels,omitempty"`
	Scenario any     `json:"scenario,omitempty"` // parameters of the measurement
}

// Origin describes where and when a figure was created.
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

// Row is a value in words.
type Row struct {
	What  string `json:"what"`
	Here  string `json:"here,omitempty"`  // empty if it was not measured
	Paper string `json:"paper,omitempty"` // empty if the text has no value
	Where string `json:"where,omitempty"` // section of the paper
}

// Panel is one plot.
type Panel struct {
	Title  string   `json:"title"`
	X      string   `json:"x"`
	Y      string   `json:"y"`
	Log    bool     `json:"logarithmic,omitempty"`
	Series []Series `json:"series"`
}

// Sources of a series.
const (
	ours       = "here"
	theirs     = "paper" // from the paper's text
	arithmetic = "sum"   // the paper's arithmetic at other sizes
)

// Series is the data of a line.
type Series struct {
	Name   string       `json:"name"`
	Of     string       `json:"of"` // here, paper, sum
	Where  string       `json:"where,omitempty"`
	Apart  bool         `json:"apart,omitempty"` // plot points without a line
	Points [][2]float64 `json:"points"`
}

// read returns a series of values from the paper's text.
func read(where, name string, points ...[2]float64) Series {
	return Series{Name: name, Of: theirs, Where: where + ", from the text", Apart: true, Points: points}
}

// marked returns a value of the paper's text as a line along an axis.
func marked(where, name string, from, to [2]float64) Series {
	s := read(where, name, from, to)
	s.Apart = false
	return s
}

// chart converts a panel to a plot.
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

// Charts returns the panels as plots.
func (f Figure) Charts() (all []*plot.Lines) {
	for _, p := range f.Panels {
		all = append(all, p.chart(f.Nature))
	}
	return all
}

// TSV writes the points, or the rows if there is no plot. Lines with # describe the figure.
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
