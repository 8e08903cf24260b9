"""Whether character 4-grams and function words tell an owner's notes from others' in 1,500 and 4,000 characters."""
import lzma, re, random, tomllib, sys
from collections import Counter
from pathlib import Path
import numpy as np
R=random.Random(1)
C, N, S = Path("../shared/data/corpus"), Path(sys.argv[1]), Path("sebp_edge")  # argv[1]: the unpacked ../shared/data/notes
def strip(t):
    t=re.sub(r"```.*?(```|\Z)","",t,flags=re.S); t=re.sub(r"`[^`\n]*`","",t); t=re.sub(r"\]\([^)]*\)","]",t); t=re.sub(r"https?://\S+","",t)
    return re.sub(r"[ \t]+"," ",re.sub(r"\n{2,}","\n",t))
def note_docs(d):
    docs=[strip(f.read_text(errors="ignore")) for f in sorted((N/d).rglob("*.md"))]
    return [d for d in docs if len(d)>300]
authors={}
authors["simonw"]=note_docs("simonw"); authors["jbranchaud"]=note_docs("jbranchaud")
for f in ("books-01","books-02"):
    docs=lzma.open(C/f"{f}.txt.xz","rt").read().split("\n<|doc|>\n")
    for i,d in enumerate(docs):
        if len(d)>190_000:
            name=f"{f}:{i}:"+re.sub(r"\s+"," ",d[:1500])[:40]
            paras=d.split("\n\n"); cut=len(paras)//30
            authors[name]=["\n".join(paras[k*cut:(k+1)*cut]) for k in range(30)]
practice=[]
for f in (S/"questions/practice").glob("*.toml"):
    practice+= ["\n".join(n["text"] for n in tomllib.loads(f.read_text())["note"])]
probe=[p.read_text() for p in (S/"texts/probe").glob("*.txt")]
general=[p.read_text() for p in (S/"questions/general").glob("*.txt")]
bundled=practice+probe+general
print("bundled chars", [len(x) for x in (practice)], sum(map(len,probe)), [len(x) for x in general])
def pieces(docs,size,rng,count,chunk=160):
    "samples of size characters, of chunks of 160 (a continuation) of random documents, cut at words"
    docs=[re.sub(r"\s+"," ",d) for d in docs]; docs=[d for d in docs if len(d)>chunk]
    w=[len(d) for d in docs]; out=[]
    for _ in range(count):
        s=[]
        while sum(map(len,s))<size:
            d=rng.choices(docs,w)[0]; b=rng.randrange(len(d)-chunk+1); p=d[b:b+chunk]; s.append(p[p.find(" ")+1:p.rfind(" ")])
        out.append(s)
    return out
FW="""the of and to a in that it is was i for on you he be with as by at have are this not but had his they from she which or we an there her were one do been all their has would will what if can when so no said who more about up them some could him into its then two out time like my your now me our than other made over did down only way us these may such any after also how because just very much even though through before here where off again while most each every those own same both few between without under against during since until yet still once though upon""".split()
PUN=list(",.;:!?'\"()-")
def fw(chunks):
    t=" ".join(chunks).lower(); ws=re.findall(r"[a-z']+",t); c=Counter(ws); n=max(1,len(ws))
    return np.array([c[w]/n for w in FW]+[t.count(p)/n for p in PUN])
class Grams:
    def __init__(s,texts,k=1500):
        c=Counter()
        for t in texts:
            t=re.sub(r"\s+"," ",t.lower()); c.update(t[i:i+4] for i in range(len(t)-3))
        s.v={g:i for i,(g,_) in enumerate(c.most_common(k))}
    def __call__(s,chunks):
        x=np.zeros(len(s.v)); n=0
        for t in chunks:
            t=re.sub(r"\s+"," ",t.lower()); n+=len(t)
            for i in range(len(t)-3):
                j=s.v.get(t[i:i+4])
                if j is not None: x[j]+=1
        return x/max(1,n)
def auc(a,b): a,b=np.array(a),np.array(b); return float(np.mean(a[:,None]>b[None])+.5*np.mean(a[:,None]==b[None]))
def study(owners,size,n=24):
    rows=[]
    for o in owners:
        rng=random.Random(hash((o,size))%10**6)
        docs=authors[o][:]; rng.shuffle(docs); k=len(docs)//3
        train,cal,test=docs[:k],docs[k:2*k],docs[2*k:]
        while sum(map(len,train))>60000 and len(train)>4: train.pop()
        back=bundled
        feats={"4-grams":Grams(back+train),"function words":fw}
        T=pieces(train,size,rng,40); B=pieces(back,size,rng,60); K=pieces(cal,size,rng,n); X=pieces(test,size,rng,n)
        others={a:pieces(authors[a],size,rng,6) for a in authors if a!=o}
        for name,f in feats.items():
            t,b,k_,x=(np.array([f(s) for s in part]) for part in (T,B,K,X))
            mu=np.concatenate([b,t[:20]]).mean(0); sd=np.concatenate([b,t[:20]]).std(0)+1e-9
            z=lambda m:(m-mu)/sd
            cen=z(t).mean(0)-z(b).mean(0); cen/=np.linalg.norm(cen)
            s=lambda m:(z(m)@cen)/np.linalg.norm(z(m),axis=1)
            zero,hundred=s(b).mean(),s(k_).mean()
            pt=lambda m:100*(s(m)-zero)/(hundred-zero)
            own=pt(x); oth={a:pt(np.array([f(p) for p in ps])) for a,ps in others.items()}
            tech={"simonw","jbranchaud"}
            same=np.concatenate([v for a,v in oth.items() if (a in tech)==(o in tech)]); diff=[v for a,v in oth.items() if (a in tech)!=(o in tech)]
            diff=np.concatenate(diff) if diff else np.array([0.])
            rows.append((o,name,own.mean(),own.std(),same.mean(),same.std(),diff.mean(),auc(own,same),auc(own,diff),max(v.mean() for v in oth.values())))
    return rows
if __name__=="__main__":
    names=list(authors); owners=names[:2]+R.sample(names[2:],8)
    for size in (1500,4000):
        rows=study(owners,size)
        print("size",size)
        for r in rows: print(f"{r[0][:34]:34} {r[1]:15} own {r[2]:5.0f}±{r[3]:3.0f} same genre {r[4]:5.0f}±{r[5]:3.0f} other {r[6]:5.0f} auc {r[7]:.3f} {r[8]:.3f} nearest other author {r[9]:.0f}",flush=True)
        for name in ("4-grams","function words"):
            m=[r for r in rows if r[1]==name]; print(name,"mean auc same",np.mean([r[7] for r in m]),"own sd",np.mean([r[3] for r in m]),"same-genre mean",np.mean([r[4] for r in m]),"nearest",np.mean([r[9] for r in m]))
